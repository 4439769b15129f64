"""Trained models as other tools take them: OpenCLIP hub folders, safetensors, ONNX."""
