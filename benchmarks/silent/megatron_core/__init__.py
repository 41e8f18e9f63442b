"""Silent errors of Megatron-Core, by what the model is spread over."""
