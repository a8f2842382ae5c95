"""What vLLM, its forks and engines like it record: choices in answers, routing logs, loads of experts."""
