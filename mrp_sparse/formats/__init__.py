"""The packed formats: weights with zeros become smaller tensors, which can be unpacked again."""
