"""What the families share: errors, checks, the autograd and torch.library plumbing, and DSL helpers."""
