//! A cold sequential read from real S3 servers, against a plain parallel-range client of the same library and file systems of others.

use super::peers::Peer;
use super::s3_server::{S3_BUCKET, S3Process, start_embedded, start_versitygw};
use super::section::SuiteSection;
use super::setup::{BenchSuite, FioLoad, fio_sample, optional};
use crate::child;
use crate::error::{BenchError, FileContext as _, Result};
use crate::fio::FioJob;
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{counter, counter_growth};
use crate::part::{FetchPart, PartOrder};
use crate::scratch::{self, file_name};

const S3_LOAD: FioLoad = FioLoad::sequential("", "read", 1 << 20, 1, 0.9);

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
    let mut servers = Vec::new();
    for (what, started) in
        [("embedded S3 server", start_embedded(suite, &buckets)), ("versitygw", start_versitygw(suite, &buckets))]
    {
        servers.extend(optional(&mut notes, what, started)?);
    }
    if servers.is_empty() {
        return Err(BenchError::Missing(notes.join("; ")));
    }
    let peers = servers.last().map(|server| Peer::open_all(suite, server, &mut notes)).transpose()?.unwrap_or_default();
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
        for (variant, label, direct, of_node, floor) in [
            ("direct", "mount, O_DIRECT 1 MiB, 1 job", true, false, 0.8),
            ("buffered", "mount, buffered 1 MiB, 1 job", false, false, 0.8),
            ("node", "mount of a node, buffered 1 MiB, 1 job", false, true, 0.7),
        ] {
            let case = BenchCase::new(&group, variant, label, FigureUnit::Bandwidth, move || {
                mount_sample(suite, server, len, direct, of_node)
            });
            let case = case.against("of the plain client", &["plain-8", "plain-16"], Some(floor));
            let peer_floors = if of_node { [None; 2] } else { [Some(1.3), Some(1.0)] };
            let case = case.against("of s3fs", &["s3fs"], peer_floors[0]);
            let case = case.against("of JuiceFS", &["juicefs"], peer_floors[1]);
            cases.push(case.warm(move || {
                // Every byte is compared once.
                let cold = server.cold_mount(suite, of_node)?;
                scratch::check_file(&cold.mount.at().join(file_name(0)), 0, len).map(|()| Default::default())
            }));
        }
    }
    if let Some(server) = servers.last() {
        let group = format!("cold, from {}", server.label);
        for peer in &peers {
            let case = BenchCase::new(&group, peer.variant, peer.label, FigureUnit::Bandwidth, move || {
                peer_sample(suite, server, peer, len)
            });
            cases.push(case.warm(move || {
                let mount = peer.mount()?;
                let file = mount.at().join(file_name(0));
                // JuiceFS has objects of its own.
                if !file.exists() {
                    scratch::write_file(&file, 0, len)?;
                }
                scratch::check_file(&file, 0, len).map(|()| Default::default())
            }));
        }
    }
    notes
        .push("Server and client share this machine's processors: the server's cost stands beside each figure.".into());
    let title =
        "Cold sequential read of one object from an S3 server on this machine, through an empty cache on tmpfs.";
    suite.measure("s3", title, cases, notes)
}

fn mount_sample(suite: &BenchSuite, server: &S3Process, len: u64, direct: bool, of_node: bool) -> Result<CaseSample> {
    let cold = server.cold_mount(suite, of_node)?;
    let files = vec![cold.mount.at().join(file_name(0))];
    let job = FioJob { direct, runtime: None, ..suite.new_job(files, &S3_LOAD, len) };
    let before = cold.store_counters()?;
    let sample = fio_sample(&job, FigureUnit::Bandwidth, &cold.roles(server))?;
    let got = counter(&counter_growth(&before, &cold.store_counters()?), "object.get_bytes");
    if got < len || got > len + len / 50 {
        return Err(BenchError::Failed(format!("{got} bytes came from the server, the object has {len}")));
    }
    Ok(sample)
}

/// A file system of others, mounted anew with an empty cache.
fn peer_sample(suite: &BenchSuite, server: &S3Process, peer: &Peer<'_>, len: u64) -> Result<CaseSample> {
    let mount = peer.mount()?;
    let files = vec![mount.at().join(file_name(0))];
    let job = FioJob { direct: false, runtime: None, ..suite.new_job(files, &S3_LOAD, len) };
    fio_sample(&job, FigureUnit::Bandwidth, &mount.roles(server))
}
