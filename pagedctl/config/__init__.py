"""The one configuration loader, shared by every command and the library. Torch-free."""
