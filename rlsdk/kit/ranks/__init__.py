"""Processes of one engine: how they meet, agree, wait for, watch and share memory with one another."""
