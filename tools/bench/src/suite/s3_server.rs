//! S3 servers on this machine, alone or at the other end of a link, and mounts of a bucket without a cached byte. Knows no load.

use super::setup::{BenchSuite, CpuRole};
use crate::child::{self, ServerProcess};
use crate::delayed_link::DelayedLink;
use crate::error::{BenchError, Result};
use crate::measure::{CaseSample, FigureUnit};
use crate::mount::{CounterValues, MountUnderTest, NodeUnderTest};
use crate::part::PartOrder;
use crate::workplace::own_program;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub(super) const S3_BUCKET: &str = "bench";
/// 3 Gbit/s.
pub(super) const LINK_BYTES_PER_SECOND: u64 = 375_000_000;
const COLD_NODE: &str = "127.0.0.1:7107";

/// A server of buckets.
pub(super) struct S3Process {
    variant: &'static str,
    pub(super) label: &'static str,
    daemon: ServerProcess,
    url: String,
    key: String,
    secret: String,
    /// Between the server and its clients.
    _link: Option<DelayedLink>,
}

/// A mount with empty caches, so that all data comes from the server, and its node.
pub(super) struct ColdMount {
    pub(super) mount: MountUnderTest,
    // Ends after its mount.
    node: Option<NodeUnderTest>,
}

impl ColdMount {
    /// The counters of the process that reads from the server.
    pub(super) fn store_counters(&self) -> Result<CounterValues> {
        self.node.as_ref().map_or_else(|| self.mount.counters(), NodeUnderTest::counters)
    }

    pub(super) fn roles<'a>(&'a self, server: &'a S3Process) -> Vec<CpuRole<'a>> {
        let node = self.node.iter().map(|node| ("node", node.daemon()));
        [("mount", self.mount.daemon()), ("server", server.daemon())].into_iter().chain(node).collect()
    }
}

impl S3Process {
    pub(super) fn daemon(&self) -> &ServerProcess {
        &self.daemon
    }

    pub(super) fn env(&self) -> [(&str, &str); 4] {
        [
            ("AWS_ACCESS_KEY_ID", &self.key),
            ("AWS_SECRET_ACCESS_KEY", &self.secret),
            ("AWS_ENDPOINT_URL", &self.url),
            ("AWS_REGION", "us-east-1"),
        ]
    }

    /// The same server at the other end of a link of [`LINK_BYTES_PER_SECOND`].
    pub(super) fn behind_link(self, round_trip: Duration) -> Result<S3Process> {
        let address = self.url.trim_start_matches("http://").parse();
        let address = address.map_err(|_| BenchError::Failed(format!("'{}' has no address", self.url)))?;
        let link = DelayedLink::start(address, round_trip, Some(LINK_BYTES_PER_SECOND))?;
        Ok(S3Process { url: format!("http://{}", link.address()), _link: Some(link), ..self })
    }

    /// A run of a part that is a client of this server.
    pub(super) fn part_sample(
        &self,
        suite: &BenchSuite,
        order: &PartOrder,
        unit: FigureUnit,
        user: &'static str,
    ) -> Result<CaseSample> {
        let mut command = suite.part_command(order, None)?;
        command.envs(self.env());
        suite.command_sample(command, unit, user, &[("server", &self.daemon)])
    }

    /// A mount of the bucket with nothing cached, alone or of a node.
    pub(super) fn cold_mount(&self, suite: &BenchSuite, of_node: bool) -> Result<ColdMount> {
        let source = format!("s3://{S3_BUCKET}");
        let sizes = ["--cache-size", "8G", "--free-space-ratio", "0"];
        let name = format!("s3-{}", self.variant);
        if of_node {
            let node = suite.memory.node(&source, COLD_NODE, None, &sizes, &self.env())?;
            let words = ["--registry", &format!("static:{}", node.addr)];
            let mount = suite.memory.mount(&name, &source, None, &words, &[])?;
            return Ok(ColdMount { mount, node: Some(node) });
        }
        let cache = suite.memory.empty_dir(&format!("cache-{name}"))?;
        let words = [&["--cache-dir", &cache], &sizes[..]].concat();
        Ok(ColdMount { mount: suite.memory.mount(&name, &source, None, &words, &self.env())?, node: None })
    }
}

/// The server of the project's own tests over a directory of buckets.
pub(super) fn start_embedded(suite: &BenchSuite, buckets: &Path) -> Result<S3Process> {
    let words = ["s3-server", &buckets.display().to_string()];
    start_testkit(suite, &words, "embedded", "the embedded S3 server", None)
}

/// The server of the project's own tests with one bucket in memory, on this host.
pub(super) fn start_in_memory(suite: &BenchSuite, variant: &'static str) -> Result<S3Process> {
    start_testkit(suite, &["s3-memory", S3_BUCKET, "127.0.0.1:0"], variant, "the S3 server in memory", None)
}

/// The same at an address of a network namespace.
pub(super) fn start_in_namespace(suite: &BenchSuite, net: &str, address: &str) -> Result<S3Process> {
    let words = ["s3-memory", S3_BUCKET, address];
    start_testkit(suite, &words, "namespace", "the S3 server in memory", Some(net))
}

fn start_testkit(
    suite: &BenchSuite,
    words: &[&str],
    variant: &'static str,
    label: &'static str,
    net: Option<&str>,
) -> Result<S3Process> {
    let program = match &suite.s3_server {
        Some(program) => program.clone(),
        None => own_program()?.with_file_name("spurline-testkit"),
    };
    if !program.exists() {
        let why = format!("{} is not built (make bench builds it)", program.display());
        return Err(BenchError::Missing(why));
    }
    let mut command = child::command_in(&program, net);
    command.args(words);
    let log = suite.memory.log(&format!("s3-{variant}"))?;
    let limit = Duration::from_secs(20);
    let (daemon, said) = ServerProcess::start_announcing(command, &["listening", "key"], "the S3 server", &log, limit)?;
    let (key, secret) = said[1].split_once(' ').unwrap_or((&said[1], ""));
    let key = key.to_owned();
    let secret = secret.to_owned();
    Ok(S3Process { variant, label, daemon, url: said[0].clone(), key, secret, _link: None })
}

/// An independent server, where installed.
pub(super) fn start_versitygw(suite: &BenchSuite, buckets: &Path) -> Result<S3Process> {
    let home = std::env::var_os("HOME").map(|h| PathBuf::from(h).join("go/bin/versitygw")).filter(|p| p.is_file());
    let program = child::find_program("versitygw").or(home).ok_or_else(|| {
        BenchError::Missing("go install github.com/versity/versitygw/cmd/versitygw@latest installs it".into())
    })?;
    let port = child::free_port().map_err(|e| BenchError::io("no free port", &e))?;
    let address = format!("127.0.0.1:{port}");
    let key = "bench-key".to_owned();
    let secret = "bench-secret".to_owned();
    let mut command = Command::new(program);
    command.args(["--access", &key, "--secret", &secret, "--port", &address, "--quiet", "posix"]).arg(buckets);
    let mut daemon = ServerProcess::start(command, "versitygw", &suite.memory.log("s3-versitygw")?)?;
    daemon.wait_for_listener(&address)?;
    let url = format!("http://{address}");
    Ok(S3Process { variant: "versitygw", label: "versitygw", daemon, url, key, secret, _link: None })
}
