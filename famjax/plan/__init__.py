"""What a job needs and how long it takes, before it runs."""
