"""`--syncheck GLOB` and the ini value `syncheck_checkpoints`: test items that judge checkpoints."""
