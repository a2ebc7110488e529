//! Benchmarks: workloads, ceilings for comparison, and reports. Runs the measured program as separate processes and deliberately
//! knows nothing of that program but the command line and counters.
#![deny(unsafe_code)]

mod checkpoint;
mod child;
mod cost;
mod cpu;
mod delayed_link;
mod engine;
mod error;
mod fio;
mod fleet;
mod iperf;
mod load;
mod machine;
mod measure;
mod mount;
mod netns;
mod numbers;
mod part;
mod places;
mod plot;
mod report;
mod scratch;
mod stop;
mod suite;
mod terminal;
mod train;
mod workplace;

use checkpoint::CheckpointArgs;
use clap::Parser as _;
use error::BenchError;
use fleet::FleetArgs;
use load::LoadArgs;
use std::path::PathBuf;
use std::process::ExitCode;
use suite::SuiteArgs;
use train::TrainArgs;

/// Measure spurline: throughput, operations, latency, processor time
#[derive(Debug, clap::Parser)]
#[command(name = "spurline-bench", bin_name = "spurline bench", version, propagate_version = true)]
#[command(max_term_width = 110, arg_required_else_help = true)]
struct BenchCli {
    /// What to run.
    #[command(subcommand)]
    command: BenchCommand,
}

/// What to run.
#[derive(Debug, clap::Subcommand)]
enum BenchCommand {
    /// Measure everything beside its ceilings, in one run
    #[command(after_long_help = SUITE_EXAMPLES)]
    Suite(SuiteArgs),
    /// Run one fio job file on many hosts at once, over several mounts in turn
    #[command(after_long_help = FLEET_EXAMPLES)]
    Fio(Box<FleetArgs>),
    /// Replay the reading of MLPerf Storage's training, and find how many accelerators are fed
    #[command(after_long_help = TRAIN_EXAMPLES)]
    Train(TrainArgs),
    /// Write checkpoints by many ranks, and read them back elsewhere
    #[command(after_long_help = CHECKPOINT_EXAMPLES)]
    Checkpoint(CheckpointArgs),
    /// Replay how loaders read models, or how key-value caches use files
    #[command(after_long_help = LOAD_EXAMPLES)]
    Load(LoadArgs),
    /// Be one ceiling or one load of the suite
    #[command(hide = true)]
    Part {
        /// What to do, in JSON
        order: String,
    },
    /// Follow the orders on standard input
    #[command(hide = true)]
    Agent,
    /// Write man pages into a directory
    #[command(hide = true)]
    Man { dir: PathBuf },
}

const SUITE_EXAMPLES: &str = "\
It needs root (mounts, network namespaces), fio and iperf3; what is missing is skipped and said. Exit codes: 1 when a figure \
could not be taken, 3 when every section was skipped.

Examples:
  Everything, about a quarter of an hour:
    spurline bench suite --json bench.json --html bench.html
  One section, quickly:
    spurline bench suite --quick --only remote
  With the disk that is to hold the cache:
    spurline bench suite --only disk --disk-dir /nvme0";

const FLEET_EXAMPLES: &str = "\
Other hosts need fio: start 'fio --server' there, or give --ssh. The job file may use ${DIR}, ${JOBS}, ${DEPTH}, ${TIME} and \
${SIZE}; fio's own sums over hosts are reported. The shipped reading jobs make no files: --job prepare writes them, once, and they \
stay. The shipped writing jobs remove what they write.

Examples:
  This machine alone: four files of 1 GiB, then reads of them through a mount, beside its source:
    spurline bench fio --job prepare --dir /srv/data --jobs 4 --rounds 1
    spurline bench fio --job seq-read-1m --dir plain=/srv/data \\
        --dir mount=/mnt/data --jobs 1,4 --plot
  The files, once, in the source of the mounts; then TCP beside RDMA on four hosts, from one host to all:
    spurline bench fio --job prepare --hosts node1 --dir /nfs/datasets/fio \\
        --jobs 4 --rounds 1
    spurline bench fio --job rand-read-1m --hosts c1,c2,c3,c4 --clients 1,2,4 \\
        --jobs 4 --depth 1,4,16 --dir tcp=/mnt/tcp/fio \\
        --dir rdma=/mnt/rdma/fio --nodes node1:9567 --html fio.html
  A job file of your own, with the fio servers started over ssh:
    spurline bench fio --job my.fio --hosts c1,c2 --dir /mnt/data --set BS=1m \\
        --ssh
  Ten NFS cases (v3 and v4, TCP and RDMA, one connection and several) of an export, beside one of tmpfs by the same server, here, \
  and on one to six clients with the processor time of the server:
    spurline bench fio --nfs tmpfs=10.0.0.1,10.0.1.1:/ram \\
        --nfs mount=10.0.0.1,10.0.1.1:/mnt --perftest
    spurline bench fio --hosts c1,c2,c3,c4,c5,c6 --ssh --clients 1,2,3,4,5,6 \\
        --server-host 10.0.0.1 --nfs 10.0.0.1,10.0.1.1:/mnt
  The shipped job files:
    spurline bench fio --list-jobs";

const TRAIN_EXAMPLES: &str = "\
Reader threads fetch whole batches, as MLPerf Storage's client does; computing is a sleep. Utilisation is the share of the \
time that the accelerators compute. Pages of earlier epochs are dropped from the page cache before a file is read again.

Examples:
  Own files in memory, read from the folder, through a mount, and through a mount with a node:
    spurline bench train --model unet3d --accelerator h100 --html train.html
  A mount of your own; write the files into its source first:
    spurline bench train --model retinanet --accelerator b200 \\
        --make /nfs/datasets/retinanet --data 500G
    spurline bench train --model retinanet --accelerator b200 \\
        --dir /mnt/data/retinanet
  Two mounts beside each other, one over TCP and one over RDMA, with sixteen accelerators:
    spurline bench train --model retinanet --accelerator b200 \\
        --accelerators 16 --dir /mnt/tcp/d --dir /mnt/rdma/d --plot";

const CHECKPOINT_EXAMPLES: &str = "\
Each rank writes its files under temporary names, syncs and renames them. Then page caches are dropped, and the files are read \
back, with checksums compared. As in MLPerf Storage, the slowest rank is the score. All files are removed at the end.

Examples:
  A plain folder, two mounts of it, and two mounts of a node, in memory:
    spurline bench checkpoint --html checkpoint.html
  A mount of your own beside its source; read back through a second mount:
    spurline bench checkpoint --dir plain=/srv/data --dir mount=/mnt/a:/mnt/b \\
        --ranks 16 --size 1G
  Four hosts, each of which reads what another one wrote, in the full size of one of eight accelerators each:
    spurline bench checkpoint --hosts c1,c2,c3,c4 --dir tcp=/mnt/tcp \\
        --dir rdma=/mnt/rdma --model llama3-70b --full-size";

const LOAD_EXAMPLES: &str = "\
Pages are dropped from the page cache before each load. Tensors are copied out of mappings, as loaders copy them to a device. \
docs/models.md says which loader reads in which way.

Examples:
  Own files in memory, read from the folder, through a mount, and through a mount with a node:
    spurline bench load --html load.html
  A mount of your own beside its source; write the model into the source first:
    spurline bench load --make /nfs/models/bench --size 16G --files 4
    spurline bench load --dir source=/nfs/models/bench \\
        --dir mount=/mnt/models/bench
  Only the default of most loaders, by one thread:
    spurline bench load --dir /mnt/models/bench --case cat,mmap --threads 1
  A key-value cache in files of 4 MiB, beside a plain folder:
    spurline bench load --kv --block 4M --dir plain=/srv/kv --dir mount=/mnt/kv";

fn main() -> ExitCode {
    match run(BenchCli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            let red = anstyle::AnsiColor::Red.on_default().bold();
            anstream::eprintln!("{red}error{red:#}: bench: {error}");
            ExitCode::from(match error {
                BenchError::Usage(_) => 2,
                BenchError::Missing(_) => 3,
                _ => 1,
            })
        }
    }
}

/// Runs a command; exit code 1 when a figure could not be taken, or with `--strict` is below its floor; 3 when every section
/// was skipped.
fn run(command: BenchCommand) -> Result<ExitCode, BenchError> {
    match command {
        BenchCommand::Suite(args) => {
            let outcome = suite::run(&args)?;
            let failed = outcome.broken > 0 || (outcome.strict && outcome.below > 0);
            let code = if failed { 1 } else { 3 * u8::from(outcome.measured == 0) };
            Ok(ExitCode::from(code))
        }
        BenchCommand::Fio(args) => fleet::run(&args).map(|()| ExitCode::SUCCESS),
        BenchCommand::Train(args) => train::run(&args).map(|()| ExitCode::SUCCESS),
        BenchCommand::Checkpoint(args) => checkpoint::run(&args).map(|()| ExitCode::SUCCESS),
        BenchCommand::Load(args) => load::run(&args).map(|()| ExitCode::SUCCESS),
        BenchCommand::Part { order } => part::run(&order).map(|()| ExitCode::SUCCESS),
        BenchCommand::Agent => engine::agent::serve_orders().map(|()| ExitCode::SUCCESS),
        BenchCommand::Man { dir } => clap_mangen::generate_to(<BenchCli as clap::CommandFactory>::command(), &dir)
            .map(|()| ExitCode::SUCCESS)
            .map_err(|e| BenchError::io(format_args!("man pages into {}", dir.display()), &e)),
    }
}
