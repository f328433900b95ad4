"""The numerical contract: switches, contracts, and what each of them promises."""
