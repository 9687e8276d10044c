"""The server: its launch, its unit, what runs against what is wanted."""
