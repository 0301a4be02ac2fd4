"""The job file that `lightkeeper init` writes; a test reads it."""

EXAMPLE = """\
# lightkeeper run job.toml          --dry-run shows what would be started, and where
name = "my-run"                     # the job's id
command = ["train.py", "--steps", "100000", "--checkpoints", "{checkpoints}"]   # {run_folder} is known too
run_folder = "runs/my-run"          # all paths are relative to this file, and the command runs where it lies
groups = 3                          # replica groups: each holds a full copy of the training state
minimum = 2                         # with fewer the whole job starts again from its newest checkpoint
spares = 0                          # groups that compute nothing while the others are there
ranks = 1                           # trainer ranks of a group on each of its nodes
nodes_per_group = 1
outage_budget_s = 60                # how long anything may be away; all time-outs follow from it
checkpoints = "checkpoints"         # below the run's folder, on storage that all nodes reach
quarantine = "quarantine.json"      # nodes that get no work: lightkeeper quarantine ls --file quarantine.json
requeue = []                        # puts the run back when its time is over or it gets SIGUSR1: ["sbatch", "job.sh"]
# torchtitan = true                 # the command holds torchtitan's arguments alone

[environment]                       # of every rank
OMP_NUM_THREADS = "1"

[options]                           # further options of `lightkeeper launch`, by name
deal = "speed"

[cluster]
kind = "local"                      # folders and process trees on this machine
nodes = 4                           # one more than the groups need: a spare

[lighthouse]
bind = "127.0.0.1:0"                # or address = "host:29400" of one that is there already
lease_s = 2.0

[preflight]                         # of a node, before a group is started there
enabled = true
options = ["--only", "memory,disk,limits,matmul,checkpoint,gpus,gpu-processes,gpu-memory,xid"]   # preflight --list
limit_s = 120.0

[burn_in]                           # of a node in quarantine, before it gets work again
enabled = true
command = []                        # empty: preflight, with the same options
rounds = 3                          # so often at least,
for_s = 300.0                       # and for so long
round_s = 600.0                     # a round that takes longer has failed

[budget]
attempts = 50                       # starts after a failure, over the whole run
job_restarts = 20                   # whole-job restarts among them
pause_s = 1.0                       # before the second start in a row; it doubles
pause_s_max = 300.0
without_progress = 5                # attempts in a row that commit no further step
in_place = 0                        # starts by the launcher itself, where the group was, without looking at the node
same_failure = 3                    # of one kind at one step, on different nodes: somebody must look
orphan_s = 600.0                    # how long the job goes on when this supervisor is gone
time_limit_s = 0.0                  # the run ends in good order after so long, then `requeue` runs; 0: no limit

# [[notify]]                        # who is told, and how
# kind = "webhook"
# url = "env:MY_WEBHOOK"
"""
