"""What a released vLLM lacks to stand for a GPU engine in tests. No part of the product."""
