"""What a training shows of its environment while it runs: settings of torch, random states, inputs, weights."""
