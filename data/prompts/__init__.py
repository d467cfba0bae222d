"""Makes prompts that demonstrate a task with examples, and reads such examples from sources."""
