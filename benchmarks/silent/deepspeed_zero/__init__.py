"""Silent errors of DeepSpeed's engines, ZeRO 1 to 3."""
