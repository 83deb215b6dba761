"""Behind data sets of ours: joins plan, fetch, work and deliver into epochs that can be gone on with from any state."""
