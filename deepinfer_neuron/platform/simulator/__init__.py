"""A Trainium core without a Trainium: rules, counters, and a model of its speed."""
