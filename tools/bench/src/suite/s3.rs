//! A cold sequential read from real S3 servers, against a plain parallel-range client of the same library.

use super::section::SuiteSection;
use super::setup::{BenchSuite, FioLoad, fio_sample, optional};
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, FileContext as _, Result};
use crate::fio::FioJob;
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, counter, counter_growth};
use crate::netns::NamespacePair;
use crate::part::{FetchPart, PartOrder};
use crate::scratch::{self, file_name};
use crate::workplace::own_program;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const S3_BUCKET: &str = "bench";
/// Slower than this machine's processors, so that the overhead of a mount must not show.
const LINK_GBIT: u32 = 3;
const S3_LOAD: FioLoad = FioLoad::sequential("", "read", 1 << 20, 1, 0.9);

/// A server over a directory of buckets.
pub(super) struct S3Process {
    variant: &'static str,
    label: String,
    /// The namespace of clients.
    net: Option<String>,
    daemon: ServerProcess,
    url: String,
    key: String,
    secret: String,
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

    /// A run of a part that is a client of this server.
    pub(super) fn part_sample(
        &self,
        suite: &BenchSuite,
        order: &PartOrder,
        unit: FigureUnit,
        user: &'static str,
    ) -> Result<CaseSample> {
        let mut command = suite.part_command(order, self.net.as_deref())?;
        command.envs(self.env());
        suite.command_sample(command, unit, user, &[("server", &self.daemon)])
    }

    /// A mount with an empty cache, so that all data comes from the server.
    fn cold_mount(&self, suite: &BenchSuite) -> Result<MountUnderTest> {
        let name = format!("s3-{}", self.variant);
        let cache = suite.memory.empty_dir(&format!("cache-{name}"))?;
        let words = ["--cache-dir", &cache, "--cache-size", "4G", "--free-space-ratio", "0"];
        suite.memory.mount(&name, format!("s3://{S3_BUCKET}"), self.net.as_deref(), &words, &self.env())
    }
}

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let len = if suite.quick { 256 << 20 } else { 1 << 30 };
    let buckets = suite.make_source("source-s3", 0, len)?;
    let file = buckets.join(S3_BUCKET).join(file_name(0));
    if !file.exists() {
        std::fs::create_dir_all(buckets.join(S3_BUCKET)).in_file(&buckets)?;
        scratch::write_file(&file, 0, len)?;
    }
    let mut notes = Vec::new();
    let pair = NamespacePair::new().and_then(|pair| pair.limit_rate(LINK_GBIT).map(|()| pair));
    let linked = pair.as_ref().map_err(Clone::clone).and_then(|pair| start_embedded(suite, &buckets, Some(pair)));
    let mut servers = Vec::new();
    for (what, started) in [
        ("embedded S3 server", start_embedded(suite, &buckets, None)),
        ("slower link", linked),
        ("versitygw", start_versitygw(suite, &buckets)),
    ] {
        servers.extend(optional(&mut notes, what, started)?);
    }
    if servers.is_empty() {
        return Err(BenchError::Missing(notes.join("; ")));
    }
    let mut cases = Vec::new();
    for server in &servers {
        let group = format!("cold, from {}", server.label);
        for (variant, label, threads) in
            [("plain-8", "plain client, 8 ranges", 8), ("plain-16", "plain client, 16 ranges", 16)]
        {
            let source = format!("s3://{S3_BUCKET}");
            let order = PartOrder::Fetch(FetchPart { source, path: file_name(0), to: None, threads });
            cases.push(BenchCase::new(&group, variant, label, FigureUnit::Bandwidth, move || {
                server.part_sample(suite, &order, FigureUnit::Bandwidth, "reader")
            }));
        }
        for (variant, label, direct) in
            [("direct", "mount, O_DIRECT 1 MiB, 1 job", true), ("buffered", "mount, buffered 1 MiB, 1 job", false)]
        {
            let case = BenchCase::new(&group, variant, label, FigureUnit::Bandwidth, move || {
                mount_sample(suite, server, len, direct)
            });
            let case = case.against("of the plain client", &["plain-8", "plain-16"], Some(0.9));
            cases.push(case.warm(move || {
                // Every byte is compared once.
                let mounted = server.cold_mount(suite)?;
                scratch::check_file(&mounted.at().join(file_name(0)), 0, len).map(|()| Default::default())
            }));
        }
    }
    notes
        .push("Server and client share this machine's processors: the server's cost stands beside each figure.".into());
    let title =
        "Cold sequential read of one object from an S3 server on this machine, through an empty cache on tmpfs.";
    suite.measure("s3", title, cases, notes)
}

fn mount_sample(suite: &BenchSuite, server: &S3Process, len: u64, direct: bool) -> Result<CaseSample> {
    let mounted = server.cold_mount(suite)?;
    let files = vec![mounted.at().join(file_name(0))];
    let job = FioJob { direct, runtime: None, ..suite.new_job(files, &S3_LOAD, len) };
    let before = mounted.counters()?;
    let roles = [("mount", mounted.daemon()), ("server", &server.daemon)];
    let sample = fio_sample(&job, FigureUnit::Bandwidth, &roles)?;
    let got = counter(&counter_growth(&before, &mounted.counters()?), "object.get_bytes");
    if got < len || got > len + len / 50 {
        return Err(BenchError::Failed(format!("{got} bytes came from the server, the object has {len}")));
    }
    Ok(sample)
}

/// The server of the project's own tests over a directory of buckets, on this host or at the other end of a link.
pub(super) fn start_embedded(suite: &BenchSuite, buckets: &Path, link: Option<&NamespacePair>) -> Result<S3Process> {
    let mut words = vec!["s3-server".to_owned(), buckets.display().to_string()];
    let Some(pair) = link else {
        return start_testkit(suite, &words, "embedded", "the embedded S3 server".into(), None);
    };
    words.extend(["--listen".to_owned(), format!("{}:0", pair.server_ip)]);
    let label = format!("the embedded S3 server over a link of {LINK_GBIT} Gbit/s");
    let started = start_testkit(suite, &words, "link", label, Some(&pair.server))?;
    Ok(S3Process { net: Some(pair.client.clone()), ..started })
}

/// The server of the project's own tests with one bucket in memory, which stores each object and part after `put_delay`.
pub(super) fn start_in_memory(suite: &BenchSuite, bucket: &str, put_delay: Duration) -> Result<S3Process> {
    let words = ["s3-memory", bucket, "--put-delay", &put_delay.as_millis().to_string()].map(String::from);
    let variant = if put_delay.is_zero() { "memory" } else { "far" };
    start_testkit(suite, &words, variant, "the S3 server in memory".into(), None)
}

fn start_testkit(
    suite: &BenchSuite,
    words: &[String],
    variant: &'static str,
    label: String,
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
    Ok(S3Process { variant, label, net: None, daemon, url: said[0].clone(), key, secret })
}

/// An independent server, where installed.
fn start_versitygw(suite: &BenchSuite, buckets: &Path) -> Result<S3Process> {
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
    crate::stop::wait_until("versitygw to listen", Duration::from_secs(20), Duration::from_millis(20), || {
        daemon.check_alive()?;
        Ok(std::net::TcpStream::connect(&address).is_ok().then_some(()))
    })?;
    let url = format!("http://{address}");
    Ok(S3Process { variant: "versitygw", label: "versitygw".into(), net: None, daemon, url, key, secret })
}
