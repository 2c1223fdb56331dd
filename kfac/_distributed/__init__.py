"""Block ownership, messages between devices, and affordable update intervals."""
