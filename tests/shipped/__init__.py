"""What is shipped, installed for real."""
