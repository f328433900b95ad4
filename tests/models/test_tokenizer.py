"""Text to ids and back, and chat templates: beside transformers, and against hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from pagedctl.errors import ModelError, RequestError
from pagedctl.models.locate import EMBEDDED_FOLDER
from pagedctl.models.tokenizer import Tokenizer, load_tokenizer
from pagedctl.models.tokenizer_files import TokenizerFiles, find_tokenizer_files

WORDS = ["Tom has 3 apples and buys 4.", "How many?", "  spaces  stay ", "naïve → 漢字 🙂"]
USER = [{"role": "user", "content": "Tom has 3 apples."}]
TURNS = [
    {"role": "system", "content": "Be brief."},
    *USER,
    {"role": "assistant", "content": "OK"},
    {"role": "user", "content": " how many?\n"},
]
TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('role ' ~ message.role ~ ' is unknown') }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CONFIG = {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def write_tokenizer(
    folder: Path,
    *,
    bos_in_file: bool = False,
    config: dict[str, Any] | None = None,
    template: str | None = None,
) -> Path:
    """A byte-level BPE of about 300 tokens in Hugging Face layout."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(WORDS * 5, trainer)
    if bos_in_file:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def tokenizer_in(folder: Path) -> Tokenizer:
    found = load_tokenizer(find_tokenizer_files(folder))
    assert found is not None
    return found


def test_a_snapshot_without_tokenizer_json_has_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(TokenizerFiles()) is None
    assert load_tokenizer(find_tokenizer_files(tmp_path)) is None


@pytest.mark.parametrize("text", [*WORDS, ""])
def test_text_comes_back_from_its_ids(tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_in(write_tokenizer(tmp_path))
    assert tokenizer.completion_text([], tokenizer.encode(text)) == text


def test_encode_adds_the_tokenizers_special_tokens(tmp_path: Path) -> None:
    plain = tokenizer_in(write_tokenizer(tmp_path)).encode("Tom")
    assert tokenizer_in(write_tokenizer(tmp_path, bos_in_file=True)).encode("Tom") == [0, *plain]


def test_a_chat_has_one_bos_where_template_and_tokenizer_both_add_it(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, bos_in_file=True, template=TEMPLATE)
    ids = tokenizer_in(folder).encode_chat(USER)
    assert ids.count(0) == 1
    assert ids[:2] == [0, 1]


def test_special_tokens_are_left_out_of_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(write_tokenizer(tmp_path))
    ids = tokenizer.encode("Tom buys 4.")
    assert tokenizer.completion_text([], [0, *ids, 2]) == "Tom buys 4."
    assert tokenizer.completion_text([], []) == ""


def test_an_id_that_the_tokenizer_lacks_has_no_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(write_tokenizer(tmp_path))
    assert tokenizer.completion_text([], [*tokenizer.encode("Tom"), 5000]) == "Tom"


def test_text_that_cannot_be_encoded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be encoded"):
        tokenizer_in(write_tokenizer(tmp_path)).encode("half a pair: \udcff")


def test_truncation_and_padding_stored_in_the_file_are_off(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = backend.encode("Tom has 3 apples").ids
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    assert tokenizer_in(folder).encode("Tom has 3 apples") == whole


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "Nothing"}}'])
def test_a_broken_tokenizer_json_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        tokenizer_in(tmp_path)
    assert caught.value.where == str(tmp_path / "tokenizer.json")


# -- chat templates --------------------------------------------------------------------------


def chat(folder: Path, messages: list[dict[str, str]] = USER) -> str:
    """The rendered text, special tokens included."""
    tokenizer = tokenizer_in(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text: str = backend.decode(tokenizer.encode_chat(messages), skip_special_tokens=False)
    return text


def test_the_template_file_wins_over_the_config(tmp_path: Path) -> None:
    config = {"chat_template": "config"}
    assert chat(write_tokenizer(tmp_path, config=config)) == "config"
    assert chat(write_tokenizer(tmp_path, config=config, template="file")) == "file"


@pytest.mark.parametrize(
    "named",
    [
        [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
        [{"name": "any", "template": "d"}],
    ],
)
def test_of_a_list_of_templates_the_default_is_taken(
    tmp_path: Path, named: list[dict[str, str]]
) -> None:
    assert chat(write_tokenizer(tmp_path, config={"chat_template": named})) == "d"


@pytest.mark.parametrize(
    "broken", [5, [], ["a"], [{"name": "a", "template": "1"}, {"name": "b", "template": "2"}]]
)
def test_a_chat_template_of_another_form_is_the_models_fault(
    tmp_path: Path, broken: object
) -> None:
    folder = write_tokenizer(tmp_path, config={"chat_template": broken})
    assert tokenizer_in(folder).encode("Tom")
    with pytest.raises(ModelError, match="chat template cannot be used"):
        chat(folder)


def test_a_byte_order_mark_before_the_template_is_no_text(tmp_path: Path) -> None:
    """microsoft/promptflow#4188: a mark at the start of a file is not part of its content."""
    folder = write_tokenizer(tmp_path, template=TEMPLATE)
    plain = chat(folder)
    path = folder / "chat_template.jinja"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert chat(folder) == plain


def test_a_model_without_a_template_refuses_messages(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        chat(write_tokenizer(tmp_path))


def test_the_templates_own_refusal_is_said(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template=TEMPLATE)
    with pytest.raises(RequestError, match="role tool is unknown") as caught:
        chat(folder, [{"role": "tool", "content": "a"}])
    assert caught.value.where == str(folder / "chat_template.jinja")


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content + 1 }}",
        "{{ nothing.deeper }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_that_breaks_or_reaches_out_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="the chat template"):
        chat(write_tokenizer(tmp_path, template=template))


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
def test_templates_know_the_special_tokens(tmp_path: Path, eos: object) -> None:
    folder = write_tokenizer(tmp_path, config={"eos_token": eos}, template="{{ eos_token }}")
    assert tokenizer_in(folder).encode_chat(USER) == [2]


def test_templates_have_the_helpers_they_expect(tmp_path: Path) -> None:
    template = (
        "{%- for one in messages %}{% generation %}{{ one | tojson }}{% endgeneration %}"
        "{% break %}{% endfor %}{{ strftime_now('%Y') | length }}{{ tools is none }}{{ absent }}"
    )
    found = chat(write_tokenizer(tmp_path, template=template), [{"role": "u", "content": "<é>"}])
    assert found == '{"role": "u", "content": "<é>"}4True'


# -- beside transformers ---------------------------------------------------------------------


def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.mark.parametrize("bos_in_file", [False, True])
@pytest.mark.parametrize(
    "config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}]
)
def test_ids_are_those_of_transformers(
    tmp_path: Path, bos_in_file: bool, config: dict[str, Any]
) -> None:
    folder = write_tokenizer(tmp_path, bos_in_file=bos_in_file, config=config, template=TEMPLATE)
    ours, theirs = tokenizer_in(folder), reference(folder)
    for text in WORDS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.completion_text([], ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    for messages in (USER, TURNS):
        assert ours.encode_chat(messages) == _chat_ids(theirs, messages)


def test_the_embedded_models_ids_are_those_of_transformers() -> None:
    ours, theirs = tokenizer_in(EMBEDDED_FOLDER), reference(EMBEDDED_FOLDER)
    for text in WORDS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.completion_text([], ids) == theirs.decode(ids, skip_special_tokens=True)
    for messages in (USER, TURNS):
        assert ours.encode_chat(messages) == _chat_ids(theirs, messages)


def _chat_ids(theirs: Any, messages: list[dict[str, str]]) -> list[int]:
    found = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids: list[int] = found["input_ids"]
    return ids
