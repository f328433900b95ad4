"""The ops: one folder each, with torch-free specs (``spec``) and implementations."""
