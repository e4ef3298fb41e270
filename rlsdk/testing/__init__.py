"""What tests of engines need: tiny models, and engines that hold plain tensors."""
