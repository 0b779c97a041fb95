"""The variant whose interface is used."""
