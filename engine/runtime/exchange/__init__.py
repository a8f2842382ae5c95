"""All-to-alls of rows between ranks: the rows as bytes, their order and their ways, over NCCL or Gloo."""
