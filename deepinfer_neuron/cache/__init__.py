"""What the network remembers between steps."""
