//! Hot reads from a node over a veth pair between two network namespaces, against the bare block reader, the
//! transport alone and iperf3 between the same two.

use super::{BenchSuite, BytePath, file_name, fio_sample, part_sample};
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::iperf;
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::MountUnderTest;
use crate::netns::NamespacePair;
use crate::table::SuiteSection;
use spurline_types::Size;
use std::path::PathBuf;
use std::time::Duration;

const FILES: usize = 4;
/// Several times the memory of a mount, so that its reads go to the node.
const LEN: u64 = 512 << 20;

struct RemoteLoad {
    name: &'static str,
    pattern: &'static str,
    block: u64,
    jobs: usize,
    floor: f64,
    unit: FigureUnit,
}

const LOADS: [RemoteLoad; 4] = [
    RemoteLoad {
        name: "1 MiB, 1 job",
        pattern: "read",
        block: 1 << 20,
        jobs: 1,
        floor: 0.85,
        unit: FigureUnit::Bandwidth,
    },
    RemoteLoad {
        name: "1 MiB, 4 jobs",
        pattern: "read",
        block: 1 << 20,
        jobs: 4,
        floor: 0.85,
        unit: FigureUnit::Bandwidth,
    },
    RemoteLoad {
        name: "128 KiB random, 4 jobs",
        pattern: "randread",
        block: 128 << 10,
        jobs: 4,
        floor: 0.6,
        unit: FigureUnit::Bandwidth,
    },
    RemoteLoad {
        name: "4 KiB random, 4 jobs",
        pattern: "randread",
        block: 4096,
        jobs: 4,
        floor: 0.5,
        unit: FigureUnit::Rate,
    },
];

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let pair = NamespacePair::new()?;
    let len = if suite.quick { LEN / 2 } else { LEN };
    let (server, client) = (Some(pair.server.as_str()), pair.client.as_str());
    let source = suite.make_source("source-remote", FILES, len)?;
    let mut notes = Vec::new();
    let addr = |port: u16| format!("{}:{port}", pair.server_ip);
    let serve = |kind: &str, port: u16, more: &[&str]| -> Result<ServerProcess> {
        let words: Vec<String> =
            [&[kind, &addr(port), "--size", "512M"], more].concat().into_iter().map(String::from).collect();
        let log = suite.log_path(&format!("{kind}-{port}"))?;
        Ok(ServerProcess::start_announcing(
            suite.part_command(&words, server),
            &["ready"],
            kind,
            &log,
            Duration::from_secs(30),
        )?
        .0)
    };
    let bare = serve("bare-serve", 7101, &[])?;
    let transport = serve("transport-serve", 7102, &[])?;
    let transport_tls = serve("transport-serve", 7103, &["--tls"])?;
    let iperf = iperf::start_server(&pair.server, pair.server_ip, &suite.log_path("iperf3")?);
    if let Err(e) = &iperf {
        notes.push(format!("No iperf3: {e}"));
    }
    // More memory than data: a hot node.
    let node_memory = format!("{}M", ((FILES as u64 * len) >> 20) * 3 / 2);
    let node = suite.start_node(
        &source,
        &addr(7100),
        server,
        &["--buffer-size", &node_memory, "--cache-size", "0", "--free-space-ratio", "0"],
    );
    let node = match node {
        Ok(node) => Some(node),
        Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
        Err(e) => {
            notes.push(format!("No node: {e}"));
            None
        }
    };
    let registry = format!("static:{}", addr(7100));
    let mut mounts: Vec<(&str, &str, MountUnderTest)> = Vec::new();
    for (variant, label, io) in [("mount-dev", "mount, /dev/fuse", "dev"), ("mount-uring", "mount, io_uring", "uring")]
    {
        if node.is_none() {
            break;
        }
        let words = ["--registry", &registry, "--fuse-io", io, "--buffer-size", "160M"];
        let mounted = suite.start_mount(&format!("remote-{io}"), &source.display().to_string(), Some(client), &words);
        match mounted.and_then(|m| suite.check_files("remote", m.at(), FILES, len).map(|()| m)) {
            Ok(mounted) => {
                notes.extend(mounted.session_line().map(|s| format!("{label}: {s}")));
                mounts.push((variant, label, mounted));
            }
            Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
            Err(e) => notes.push(format!("No {label}: {e}")),
        }
    }
    let null = suite.mount_null("uring");
    if let Err(e) = &null {
        notes.push(format!("No empty file system over io_uring: {e}"));
    }
    let mut cases = Vec::new();
    for load in &LOADS {
        let read = |kind: &str, port: u16| -> Vec<String> {
            let mut words: Vec<String> = vec![kind.into(), addr(port)];
            words.extend([
                "--connections".into(),
                load.jobs.to_string(),
                "--block".into(),
                Size(load.block).to_string(),
            ]);
            words.extend(["--size".into(), "512M".into(), "--time".into(), format!("{}ms", suite.time.as_millis())]);
            words.extend((load.pattern == "randread").then(|| "--random".into()));
            words
        };
        let mut tls_words = read("transport-read", 7103);
        tls_words.push("--tls".into());
        for (variant, label, daemon, words) in [
            ("bare", "bare block reader", &bare, read("bare-read", 7101)),
            ("transport", "transport alone", &transport, read("transport-read", 7102)),
            ("transport-tls", "transport alone, TLS", &transport_tls, tls_words),
        ] {
            let case = BenchCase::new(load.name, variant, label, load.unit, move || {
                let command = suite.part_command(&words, Some(client));
                part_sample(command, suite.time * 3 + Duration::from_secs(30), load.unit, &[("node", daemon)])
            });
            cases.push(match variant {
                "bare" => case,
                "transport" => case.against("of bare", &["bare"], Some(0.95)),
                _ => case.against("of bare", &["bare"], None),
            });
        }
        if iperf.is_ok() && load.block == 1 << 20 {
            let (time, jobs, ip) = (suite.time, load.jobs, pair.server_ip);
            let label = if jobs == 1 { "iperf3, 1 stream" } else { "iperf3, 4 streams" };
            cases.push(BenchCase::new(load.name, "iperf3", label, FigureUnit::Bandwidth, move || {
                let got = iperf::receive(client, ip, jobs, time)?;
                let cpu = vec![("node", got.sender_cpu), ("reader", got.receiver_cpu)];
                Ok(CaseSample { value: got.bandwidth, bytes: got.bytes, ops: got.bytes >> 20, cpu, latency_us: None })
            }));
        }
        if let Ok(null) = &null {
            let files = vec![null.at().join("data")];
            let job = suite.new_job(files, load.pattern, load.block, load.jobs, len);
            cases.push(BenchCase::new(load.name, "null-uring", "empty fs, io_uring", load.unit, move || {
                fio_sample(&job, load.unit, &[("client", null.daemon())])
            }));
        }
        for (variant, label, mounted) in &mounts {
            let Some(node) = &node else { break };
            let files: Vec<PathBuf> = (0..FILES).map(|i| mounted.at().join(file_name(i))).collect();
            let job = suite.new_job(files, load.pattern, load.block, load.jobs, len);
            let first = job.clone();
            let mut case = BenchCase::new(load.name, variant, label, load.unit, move || {
                fio_sample(&job, load.unit, &[("client", mounted.daemon()), ("node", node.daemon())])
            })
            .against("of bare", &["bare"], Some(load.floor))
            .against_series("of bare and empty fs in turn", &["bare", "null-uring"], None)
            .warm(move || {
                let before = node.counters(&suite.spurline)?;
                let (mut grown, wrong) = suite.warm_up(mounted, &first, BytePath::Tcp)?;
                let served = crate::mount::counter_growth(&before, &node.counters(&suite.spurline)?);
                grown.extend(served.into_iter().map(|(name, n)| (format!("node.{name}"), n)));
                Ok((grown, wrong))
            });
            if load.block == 1 << 20 {
                case = case.limit_cpu("client", 0.25).limit_cpu("node", 0.20);
            }
            cases.push(case);
        }
    }
    let rows = suite.rounds("remote", cases)?;
    notes.push(
        "In turn: every byte goes through a bare reader and through an empty file system, and both, reader and node share \
         this machine's processors; where those are the limit a mount can't be faster than the two in turn."
            .into(),
    );
    notes.push(
        "veth has no wire: the receiver's TCP work runs in the sender's context, or on either side's softirq.".into(),
    );
    let title =
        "Hot reads from a node over veth between two network namespaces; the bare reader has a connection per job.";
    Ok(SuiteSection { name: "remote", title, skipped: None, notes, rows })
}
