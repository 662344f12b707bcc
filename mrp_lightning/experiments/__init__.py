"""Many runs → tables, pictures and pages."""
