//! `bench load --hosts`: a model that one host loads alone, and then all hosts at the same moment. A host is a network namespace with
//! a node and a mount behind a link of limited rate. Every load reads files that no cache has.

use super::model::{ModelFiles, find_model, write_model};
use super::replay::{LoadCase, run_load};
use super::{LoadArgs, LoadReport, describe_model};
use crate::child;
use crate::error::{BenchError, FileContext as _, Result};
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::netns::BridgedHosts;
use crate::numbers::{median, three_digits};
use crate::report::ReportSection;
use crate::scratch::ScratchDir;
use crate::suite;
use serde_json::{Value, json};
use spurline_types::Size;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Instant;

const NODE_PORT: u16 = 7130;
/// Memory of a node beside its share of two models: requests, connections and names.
const NODE_EXTRA_BYTES: u64 = 192 << 20;

/// Ends of the names of folders.
const ALONE: &str = "alone";
const TOGETHER: &str = "together";

/// A load by one host or by all.
#[derive(Debug, Clone, Copy)]
struct HostLoad {
    /// Time from the common start until the last host has all bytes.
    seconds: f64,
    /// Bytes that the nodes read from the source, as a multiple of the model.
    source_copies: f64,
    /// Bytes that the busiest node sent, as a multiple of the mean of all nodes.
    busiest_node: f64,
}

/// A case with its rounds.
struct HostCase {
    case: LoadCase,
    threads: usize,
    alone: Vec<HostLoad>,
    together: Vec<HostLoad>,
}

impl HostCase {
    /// The folder of a load of a round, below the source.
    fn folder(&self, round: u32, by: &str) -> PathBuf {
        PathBuf::from(format!("{}-{}-{round}-{by}", self.case.word(), self.threads))
    }

    fn ratio(&self) -> f64 {
        median_of(&self.together, |load| load.seconds) / median_of(&self.alone, |load| load.seconds).max(1e-9)
    }
}

fn median_of(loads: &[HostLoad], of: fn(&HostLoad) -> f64) -> f64 {
    median(&loads.iter().map(of).collect::<Vec<_>>())
}

/// The hosts, with a node and a mount each.
struct HostGroup {
    spurline: PathBuf,
    model: ModelFiles,
    // Dropped in this order: mounts before nodes, both before the network.
    mounts: Vec<MountUnderTest>,
    nodes: Vec<NodeUnderTest>,
    _net: BridgedHosts,
}

impl HostGroup {
    fn start(args: &LoadArgs, hosts: usize, source: &HostSource, scratch: &ScratchDir) -> Result<HostGroup> {
        let me = std::env::current_exe().map_err(|error| BenchError::io("can't find this program", &error))?;
        let spurline = suite::program(args.spurline.as_deref(), &me)?;
        let net = BridgedHosts::new(hosts)?;
        net.shape_links(args.link, args.delay)?;
        let logs = scratch.subdir("logs")?;
        let memory = Size(2 * args.size.0 / hosts as u64 + NODE_EXTRA_BYTES).to_string();
        let mut nodes = Vec::new();
        for host in 0..hosts {
            let address = net.address(host);
            let cache = scratch.subdir(&format!("cache-{host}"))?;
            let mut command = child::command_in(&spurline, Some(net.namespace(host)));
            command.args([
                "node",
                "--metrics",
                "none",
                "--allow-anyone",
                "--cache-size",
                "0",
                "--buffer-size",
                &memory,
            ]);
            command.arg("--source").arg(&source.dir).arg("--cache-dir").arg(cache);
            command.args(["--group-network", &address, "--group-port", &NODE_PORT.to_string()]);
            let log = logs.join(format!("node-{host}.log"));
            let listens_at = format!("{address}:{NODE_PORT}");
            nodes.push(NodeUnderTest::start(command, &listens_at, Some(net.namespace(host)), &log)?);
        }
        let addresses: Vec<&str> = nodes.iter().map(|node| node.addr.as_str()).collect();
        let registry = format!("static:{}", addresses.join(","));
        let mut mounts = Vec::new();
        for host in 0..hosts {
            let at = scratch.subdir(&format!("mnt-{host}"))?;
            let mut command = child::command_in(&spurline, Some(net.namespace(host)));
            command.arg("mount").arg(&source.dir).arg(&at).args(["--metrics", "none", "--registry", &registry]);
            let log = logs.join(format!("mount-{host}.log"));
            mounts.push(MountUnderTest::start(command, &at, Some(net.namespace(host)), &log)?);
        }
        Ok(HostGroup { spurline, model: source.model.clone(), mounts, nodes, _net: net })
    }

    /// Loads the model in `folder` on these hosts at the same moment.
    fn load(&self, hosts: &[usize], folder: &Path, plan: &HostCase, round: u32, work: &Path) -> Result<HostLoad> {
        let models: Vec<ModelFiles> = hosts.iter().map(|host| self.model_at(*host, folder)).collect();
        let source_before = self.node_counters("object.get_bytes")?;
        let sent_before = self.node_counters("remotecache.send_bytes")?;
        let start = Barrier::new(hosts.len() + 1);
        let loaded = std::thread::scope(|scope| {
            let loads: Vec<_> = models
                .iter()
                .map(|model| {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        run_load(model, plan.case, plan.threads, round, work)
                    })
                })
                .collect();
            start.wait();
            let began = Instant::now();
            for load in loads {
                load.join().unwrap_or_else(|_| Err(BenchError::Failed("a thread that loads panicked".to_owned())))?;
            }
            Ok::<_, BenchError>(began.elapsed().as_secs_f64())
        })?;
        let source = growth_of(&source_before, &self.node_counters("object.get_bytes")?);
        let sent = growth_of(&sent_before, &self.node_counters("remotecache.send_bytes")?);
        let mean = sent.iter().sum::<u64>() as f64 / sent.len() as f64;
        Ok(HostLoad {
            seconds: loaded,
            source_copies: source.iter().sum::<u64>() as f64 / self.model.bytes as f64,
            busiest_node: sent.into_iter().max().unwrap_or(0) as f64 / mean.max(1.0),
        })
    }

    /// The model in `folder` as a host sees it. Nothing is read there: the read of a header would fetch the first blocks.
    fn model_at(&self, host: usize, folder: &Path) -> ModelFiles {
        let dir = self.mounts[host].at().join(folder);
        let paths = self.model.paths.iter().map(|path| dir.join(path.file_name().unwrap_or_default())).collect();
        ModelFiles { paths, ..self.model.clone() }
    }

    /// A counter of each node.
    fn node_counters(&self, name: &str) -> Result<Vec<u64>> {
        let counters = self.nodes.iter().map(|node| node.counters(&self.spurline));
        counters.map(|values| Ok(values?.get(name).copied().unwrap_or(0))).collect()
    }
}

fn growth_of(before: &[u64], after: &[u64]) -> Vec<u64> {
    before.iter().zip(after).map(|(before, after)| after.saturating_sub(*before)).collect()
}

/// The source of all loads: one model, and a folder with links to its files for each load.
struct HostSource {
    dir: PathBuf,
    model: ModelFiles,
}

impl HostSource {
    /// Makes the folders before a node runs: a node may list the source once and show new names later.
    fn make(args: &LoadArgs, cases: &[HostCase], scratch: &ScratchDir) -> Result<HostSource> {
        let dir = scratch.subdir("source")?;
        let made = scratch.subdir("model")?;
        write_model(&made, args.size.0, args.files as usize)?;
        let model = find_model(&made)?;
        for plan in cases {
            for round in 1..=args.rounds {
                for by in [ALONE, TOGETHER] {
                    let folder = dir.join(plan.folder(round, by));
                    std::fs::create_dir_all(&folder).in_file(&folder)?;
                    for path in &model.paths {
                        let link = folder.join(path.file_name().unwrap_or_default());
                        std::fs::hard_link(path, &link).in_file(&link)?;
                    }
                }
            }
        }
        Ok(HostSource { dir, model })
    }
}

/// The cases of the arguments; without any, those of loaders by default and of loaders that prefetch.
fn cases_of(args: &LoadArgs) -> Vec<HostCase> {
    let cases = if args.case.is_empty() { &[LoadCase::Mmap, LoadCase::Pread16m] } else { args.case.as_slice() };
    let mut plans = Vec::new();
    for case in cases {
        let threads = if case.has_threads() { args.threads.as_slice() } else { &[1] };
        plans.extend(threads.iter().map(|threads| HostCase {
            case: *case,
            threads: *threads as usize,
            alone: Vec::new(),
            together: Vec::new(),
        }));
    }
    plans
}

/// Runs all rounds.
///
/// # Errors
/// `Missing` without network namespaces or a shaped link; `Failed` when a node, a mount or a read fails.
pub fn run_hosts(args: &LoadArgs, hosts: usize, scratch: &ScratchDir) -> Result<LoadReport> {
    let mut cases = cases_of(args);
    let source = HostSource::make(args, &cases, scratch)?;
    let about = format!(
        "{}; {hosts} hosts behind links of {} Mbit/s with a round trip of {} ms",
        describe_model(&source.model),
        args.link,
        args.delay.as_secs_f64() * 1e3
    );
    anstream::println!("{about}");
    let group = HostGroup::start(args, hosts, &source, scratch)?;
    let copies = scratch.subdir("copies")?;
    let all: Vec<usize> = (0..hosts).collect();
    for round in 1..=args.rounds {
        for plan in &mut cases {
            // The host alone is another one in each round.
            let host = round as usize % hosts;
            let alone = group.load(&[host], &plan.folder(round, ALONE), plan, round, &copies)?;
            plan.alone.push(alone);
            let together = group.load(&all, &plan.folder(round, TOGETHER), plan, round, &copies)?;
            plan.together.push(together);
        }
    }
    let mut section = ReportSection::of_table(case_table(&cases, hosts), Vec::new());
    section.about.push(about);
    let result = json!({
        "model_bytes": source.model.bytes, "hosts": hosts, "link_bits_per_second": u64::from(args.link) * 1_000_000,
        "round_trip_seconds": args.delay.as_secs_f64(), "cases": cases.iter().map(case_json).collect::<Vec<_>>(),
    });
    let notes = vec![
        "Each load reads files that no cache has. Copies: bytes read from the source, as a multiple of the model. \
         Busiest node: its sent bytes, as a multiple of the mean."
            .to_owned(),
    ];
    Ok((section, result, notes))
}

fn case_table(cases: &[HostCase], hosts: usize) -> Vec<Vec<String>> {
    let together = format!("{hosts} hosts, s");
    let head = ["case", "threads", "1 host, s", &together, "of 1 host", "copies", "busiest node"];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    for plan in cases {
        table.push(vec![
            plan.case.word().to_owned(),
            plan.threads.to_string(),
            three_digits(median_of(&plan.alone, |load| load.seconds)),
            three_digits(median_of(&plan.together, |load| load.seconds)),
            format!("{:.2}", plan.ratio()),
            format!("{:.2}", median_of(&plan.together, |load| load.source_copies)),
            format!("{:.2}", median_of(&plan.together, |load| load.busiest_node)),
        ]);
    }
    table
}

fn case_json(plan: &HostCase) -> Value {
    json!({
        "case": plan.case.word(), "threads": plan.threads, "ratio": plan.ratio(),
        "alone": plan.alone.iter().map(load_json).collect::<Vec<_>>(),
        "together": plan.together.iter().map(load_json).collect::<Vec<_>>(),
    })
}

fn load_json(load: &HostLoad) -> Value {
    json!({"seconds": load.seconds, "source_copies": load.source_copies, "busiest_node": load.busiest_node})
}
