"""Stand-ins that let code written for other back ends run on this package's operators."""
