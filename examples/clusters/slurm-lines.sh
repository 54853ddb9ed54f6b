# For plait submit play.toml --on slurm --with lines=slurm-lines.sh: options of sbatch, and what is done before the start.
#SBATCH --mail-type=END,FAIL
#SBATCH --gres=gpu:h100:8
#SBATCH --exclude=n07
#SBATCH --licenses=scratch:1
module load cuda/12.8
# Node 0 by its name in the InfiniBand network; without this line, by its address in slurm.conf.
export PLAIT_LEADER=$(hostname -s)-ib
