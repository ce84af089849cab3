"""The wire: .proto contracts (fl/v1), the code made from them, and the codec between tensors and bytes."""
