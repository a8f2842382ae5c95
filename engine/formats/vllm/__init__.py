"""Records of vLLM, its forks and engines like it: choices in answers, routing logs, loads of experts."""
