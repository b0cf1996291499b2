"""Models as tensors: token ids in, hidden states and logits out, and a KV cache that rolls back."""
