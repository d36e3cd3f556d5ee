"""Tests of blocks, tasks and flows against a real Prefect server in a temporary database."""
