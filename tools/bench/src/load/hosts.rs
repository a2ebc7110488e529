//! `bench load --hosts`: a model that one host loads alone, and then all hosts at the same moment. A host is a network namespace with
//! a node and a mount behind a link of limited rate. Every load reads files that no cache has.

use super::cases::{LoadCase, run_load};
use super::model::{ModelFiles, find_model, write_model};
use super::{LoadArgs, LoadResult};
use crate::error::{FileContext as _, Result};
use crate::mount::{MountUnderTest, NodeUnderTest, counter};
use crate::netns::BridgedHosts;
use crate::numbers::{median_of, three_digits};
use crate::terminal::word_of;
use crate::workplace::Workplace;
use serde_json::{Value, json};
use spurline_types::Size;
use std::path::{Path, PathBuf};

const HOST_NODE_PORT: u16 = 7130;
/// Memory of a node beside its share of two models: requests, connections and names.
const NODE_EXTRA_BYTES: u64 = 192 << 20;

/// Ends of the names of folders.
const ALONE: &str = "alone";
const TOGETHER: &str = "together";

/// A load by one host or by all.
#[derive(Debug, Clone, Copy, serde::Serialize)]
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
        PathBuf::from(format!("{}-{}-{round}-{by}", word_of(&self.case), self.threads))
    }

    fn ratio(&self) -> f64 {
        median_of(&self.together, |load| load.seconds) / median_of(&self.alone, |load| load.seconds).max(1e-9)
    }
}

/// The hosts, with a node and a mount each.
struct HostGroup {
    model: ModelFiles,
    // Dropped in this order: mounts before nodes, both before the network.
    mounts: Vec<MountUnderTest>,
    nodes: Vec<NodeUnderTest>,
    _net: BridgedHosts,
}

impl HostGroup {
    fn start(args: &LoadArgs, hosts: usize, source: &HostSource, work: &Workplace) -> Result<HostGroup> {
        let net = BridgedHosts::new(hosts)?;
        net.shape_links(0..hosts, args.link, args.delay)?;
        let memory = Size(2 * args.size.0 / hosts as u64 + NODE_EXTRA_BYTES).to_string();
        let addresses: Vec<String> = (0..hosts).map(|host| format!("{}:{HOST_NODE_PORT}", net.address(host))).collect();
        let registry = format!("static:{}", addresses.join(","));
        let mut nodes = Vec::new();
        for (host, address) in addresses.iter().enumerate() {
            let words = ["--cache-size", "0", "--buffer-size", &memory];
            nodes.push(work.node(&source.dir, address, Some(net.namespace(host)), &words, &[])?);
        }
        let mut mounts = Vec::new();
        for host in 0..hosts {
            let words = ["--registry", &registry];
            let name = format!("host-{host}");
            mounts.push(work.mount(&name, &source.dir, Some(net.namespace(host)), &words, &[])?);
        }
        Ok(HostGroup { model: source.model.clone(), mounts, nodes, _net: net })
    }

    /// Loads the model in `folder` on these hosts at the same moment. Nothing is read there before: the read of a header would
    /// fetch the first blocks.
    fn load(&self, hosts: &[usize], folder: &Path, plan: &HostCase, round: u32, copies: &Path) -> Result<HostLoad> {
        let models: Vec<ModelFiles> =
            hosts.iter().map(|host| self.model.in_folder(&self.mounts[*host].at().join(folder))).collect();
        let source_before = self.node_counters("object.get_bytes")?;
        let sent_before = self.node_counters("remotecache.send_bytes")?;
        let seconds = run_load(&models, plan.case, plan.threads, round, copies)?.seconds;
        let source = growth_of(&source_before, &self.node_counters("object.get_bytes")?);
        let sent = growth_of(&sent_before, &self.node_counters("remotecache.send_bytes")?);
        let mean = sent.iter().sum::<u64>() as f64 / sent.len() as f64;
        Ok(HostLoad {
            seconds,
            source_copies: source.iter().sum::<u64>() as f64 / self.model.bytes() as f64,
            busiest_node: sent.into_iter().max().unwrap_or(0) as f64 / mean.max(1.0),
        })
    }

    /// A counter of each node.
    fn node_counters(&self, name: &str) -> Result<Vec<u64>> {
        self.nodes.iter().map(|node| Ok(counter(&node.counters()?, name))).collect()
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
    fn make(args: &LoadArgs, cases: &[HostCase], work: &Workplace) -> Result<HostSource> {
        let dir = work.scratch.subdir("source")?;
        let made = work.scratch.subdir("model")?;
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
    let of_case = |case: &LoadCase| {
        let case = *case;
        case.threads(&args.threads).iter().map(move |threads| HostCase {
            case,
            threads: *threads as usize,
            alone: Vec::new(),
            together: Vec::new(),
        })
    };
    cases.iter().flat_map(of_case).collect()
}

/// Runs all rounds.
/// `Missing` without network namespaces or a shaped link; `Failed` when a node, a mount or a read fails.
pub(super) fn run_hosts(args: &LoadArgs, hosts: usize, work: &Workplace) -> Result<LoadResult> {
    let mut cases = cases_of(args);
    let source = HostSource::make(args, &cases, work)?;
    let about = format!(
        "{}; {hosts} hosts behind links of {} Mbit/s with a round trip of {} ms",
        source.model.describe(),
        args.link,
        args.delay.as_secs_f64() * 1e3
    );
    anstream::println!("{about}");
    let group = HostGroup::start(args, hosts, &source, work)?;
    let copies = work.scratch.subdir("copies")?;
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
    let json = json!({
        "model_bytes": source.model.bytes(), "hosts": hosts, "link_bits_per_second": u64::from(args.link) * 1_000_000,
        "round_trip_seconds": args.delay.as_secs_f64(), "cases": cases.iter().map(case_json).collect::<Vec<_>>(),
    });
    let notes = vec![
        "Each load reads files that no cache has. Copies: bytes read from the source, as a multiple of the model. \
         Busiest node: its sent bytes, as a multiple of the mean."
            .to_owned(),
    ];
    Ok(LoadResult { about, table: case_table(&cases, hosts), notes, json })
}

fn case_table(cases: &[HostCase], hosts: usize) -> Vec<Vec<String>> {
    let together = format!("{hosts} hosts, s");
    let head = ["case", "threads", "1 host, s", &together, "of 1 host", "copies", "busiest node"];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    for plan in cases {
        table.push(vec![
            word_of(&plan.case),
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
    json!({ "case": word_of(&plan.case), "threads": plan.threads, "ratio": plan.ratio(), "alone": plan.alone, "together": plan.together })
}
