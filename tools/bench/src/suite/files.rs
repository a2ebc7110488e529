//! Many small files after a fresh mount of a warm cache: read, stat, `ls -l`; alone and from a node.

use super::{Suite, file_name, with_cpu};
use crate::child;
use crate::error::{Error, Result};
use crate::measure::{Case, Sample, Unit};
use crate::mount::{Mounted, Node};
use crate::netns::Pair;
use crate::scratch;
use crate::table::Section;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const LEN: u64 = 100 << 10;

/// Where the folder is looked at.
enum Place<'a> {
    /// The source itself.
    Plain(&'a Path),
    /// A mount made anew for every cold look.
    Mount(&'a dyn Fn() -> Result<Mounted>, Option<&'a Node>),
}

pub(super) fn run(suite: &Suite) -> Result<Section> {
    let count = if suite.quick { 2_000 } else { 10_000 };
    let source = suite.source("source-files", count, LEN)?;
    let source_text = source.display().to_string();
    let mut notes =
        vec![format!("{count} files of 100 KiB in one folder; cold is right after mounting, hot the same again.")];
    let cache = suite.memory.fresh("cache-files")?.display().to_string();
    let fixed = ["--cache-dir", &cache, "--cache-size", "4G", "--free-space-ratio", "0", "--buffer-size", "300M"];
    let lone = || suite.mount("files-lone", &source_text, None, &fixed);
    warm_up(suite, &lone()?, count)?;

    let pair = Pair::new();
    let node = match &pair {
        Ok(pair) => {
            let addr = format!("{}:7100", pair.server_ip);
            let words = ["--buffer-size", "300M", "--cache-size", "4G", "--free-space-ratio", "0"];
            suite.node(&source, &addr, Some(&pair.server), &words)
        }
        Err(e) => Err(e.clone()),
    };
    let net = pair.as_ref().ok().map(|p| p.client.as_str());
    let registry = format!("static:{}", node.as_ref().map(|n| n.addr.clone()).unwrap_or_default());
    let remote = || suite.mount("files-remote", &source_text, net, &["--registry", &registry]);
    let remote_ready = match &node {
        Ok(_) => remote().and_then(|m| warm_up(suite, &m, count)),
        Err(e) => Err(e.clone()),
    };
    let mut places: Vec<(&str, &str, Place<'_>)> =
        vec![("tmpfs", "tmpfs", Place::Plain(&source)), ("lone", "mount alone", Place::Mount(&lone, None))];
    match (&remote_ready, &node) {
        (Ok(()), Ok(node)) => places.push(("remote", "mount of a node over veth", Place::Mount(&remote, Some(node)))),
        (Err(Error::Interrupted), _) => return Err(Error::Interrupted),
        (Err(e), _) | (Ok(()), Err(e)) => notes.push(format!("No mount of a node: {e}")),
    }

    let mut cases = Vec::new();
    for (threads, group) in [(1, "read all, 1 thread"), (8, "read all, 8 threads")] {
        for (variant, label, place) in &places {
            let take = move || files(suite, place, count, threads, false, 0);
            let case = Case::new(group, variant, label, Unit::Rate, take);
            cases.push(if *variant == "tmpfs" { case } else { case.against("of tmpfs", &["tmpfs"], None) });
        }
    }
    for (pass, group) in [(0, "stat all, 1 thread, cold"), (1, "stat all, 1 thread, hot")] {
        for (variant, label, place) in &places {
            let take = move || files(suite, place, count, 1, true, pass);
            cases.push(Case::new(group, variant, label, Unit::Rate, take));
        }
    }
    for (pass, group) in [(0, "ls -l, cold"), (1, "ls -l, hot")] {
        for (variant, label, place) in &places {
            cases.push(Case::new(group, variant, label, Unit::Time, move || ls(place, count, pass)));
        }
    }
    let rows = suite.rounds("files", cases)?;
    let title = "Many small files after a fresh mount of a warm cache, cache on tmpfs.";
    Ok(Section { name: "files", title, skipped: None, notes, rows })
}

/// Reads everything once and compares some of it.
fn warm_up(suite: &Suite, mounted: &Mounted, count: usize) -> Result<()> {
    super::tell("files", "filling the cache");
    let words = ["files", &mounted.at().display().to_string(), "--threads", "4"].map(String::from);
    child::run(suite.part(&words, None), Duration::from_secs(300))?;
    (0..count).step_by(97).try_for_each(|i| scratch::check_file(&mounted.at().join(file_name(i)), i as u64, LEN))
}

/// The folder to look at, and the mount to take away afterwards.
fn enter(place: &Place<'_>) -> Result<(PathBuf, Option<Mounted>)> {
    match place {
        Place::Plain(dir) => Ok((dir.to_path_buf(), None)),
        Place::Mount(mount, _) => {
            let mounted = mount()?;
            Ok((mounted.at().to_owned(), Some(mounted)))
        }
    }
}

fn roles<'a>(place: &'a Place<'_>, mounted: &'a Option<Mounted>) -> Vec<super::Role<'a>> {
    let mut roles: Vec<super::Role<'a>> = mounted.iter().map(|m| ("mount", m.daemon())).collect();
    if let Place::Mount(_, Some(node)) = place {
        roles.push(("node", node.daemon()));
    }
    roles
}

/// The last of `pass + 1` passes over the folder of a fresh mount, as a sample.
fn files(suite: &Suite, place: &Place<'_>, count: usize, threads: usize, stat: bool, pass: usize) -> Result<Sample> {
    let (dir, mounted) = enter(place)?;
    let mut words = ["files", &dir.display().to_string(), "--threads", &threads.to_string()].map(String::from).to_vec();
    words.extend(["--passes".into(), (pass + 1).to_string()]);
    words.extend(stat.then(|| "--stat".into()));
    let roles = roles(place, &mounted);
    let (done, mut cpu) = with_cpu(&roles, || child::run(suite.part(&words, None), Duration::from_secs(300)))?;
    cpu.push(("reader", done.cpu));
    let json: Value = serde_json::from_str(done.out.trim())
        .map_err(|e| Error::Failed(format!("the reader of files said {:?}: {e}", done.out)))?;
    let last = &json["passes"][pass];
    let number = |key: &str| last[key].as_f64().unwrap_or(0.0);
    if number("ops") as usize != count || number("bytes") as u64 != count as u64 * LEN {
        return Err(Error::Failed(format!("not all files were read: {last}")));
    }
    // The processor time is of all passes, and only one of them read anything.
    let bytes = if stat { 0 } else { number("bytes") as u64 };
    let ops = count as u64 * (pass as u64 + 1);
    Ok(Sample { value: number("ops") / number("seconds"), bytes, ops, cpu, latency_us: None })
}

/// The last of `pass + 1` runs of `ls -l` on a fresh mount.
fn ls(place: &Place<'_>, count: usize, pass: usize) -> Result<Sample> {
    let (dir, mounted) = enter(place)?;
    let roles = roles(place, &mounted);
    let list = || {
        let mut command = Command::new("ls");
        // Numeric, so that no name service is measured.
        command.arg("-ln").arg(&dir).env("LC_ALL", "C");
        child::run(command, Duration::from_secs(120))
    };
    for _ in 0..pass {
        list()?;
    }
    let (done, mut cpu) = with_cpu(&roles, list)?;
    cpu.push(("reader", done.cpu));
    if done.out.lines().count() != count + 1 {
        return Err(Error::Failed(format!("ls told of {} lines, {} files are there", done.out.lines().count(), count)));
    }
    Ok(Sample { value: done.elapsed, bytes: 0, ops: count as u64, cpu, latency_us: None })
}
