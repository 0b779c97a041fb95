"""The files of a model: configuration, tensor names, number formats and validated reading."""
