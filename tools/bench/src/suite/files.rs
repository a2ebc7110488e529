//! Many small files after a fresh mount of a warm cache: read, stat, `ls -l`; alone and from a node.

use super::section::SuiteSection;
use super::{BenchSuite, file_name, with_cpu};
use crate::child;
use crate::error::{BenchError, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::netns::NamespacePair;
use crate::scratch;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const SMALL_FILE_BYTES: u64 = 100 << 10;

/// The file system under test.
enum FilesPlace<'a> {
    /// The source itself.
    Plain(&'a Path),
    /// A mount, created anew for every cold sample.
    Mount(&'a dyn Fn() -> Result<MountUnderTest>, Option<&'a NodeUnderTest>),
}

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let count = if suite.quick { 2_000 } else { 10_000 };
    let source = suite.make_source("source-files", count, SMALL_FILE_BYTES)?;
    let source_text = source.display().to_string();
    let mut notes =
        vec![format!("{count} files of 100 KiB in one folder; cold is right after mounting, hot the same again.")];
    let cache = suite.memory.empty_subdir("cache-files")?.display().to_string();
    let fixed = ["--cache-dir", &cache, "--cache-size", "4G", "--free-space-ratio", "0", "--buffer-size", "300M"];
    let lone = || suite.start_mount("files-lone", &source_text, None, &fixed);
    warm_up(suite, &lone()?, count)?;

    let pair = NamespacePair::new();
    let node = match &pair {
        Ok(pair) => {
            let addr = format!("{}:7100", pair.server_ip);
            let words = ["--buffer-size", "300M", "--cache-size", "4G", "--free-space-ratio", "0"];
            suite.start_node(&source, &addr, Some(&pair.server), &words)
        }
        Err(e) => Err(e.clone()),
    };
    let net = pair.as_ref().ok().map(|p| p.client.as_str());
    let registry = format!("static:{}", node.as_ref().map(|n| n.addr.clone()).unwrap_or_default());
    let remote = || suite.start_mount("files-remote", &source_text, net, &["--registry", &registry]);
    let remote_ready = match &node {
        Ok(_) => remote().and_then(|m| warm_up(suite, &m, count)),
        Err(e) => Err(e.clone()),
    };
    let mut places: Vec<(&str, &str, FilesPlace<'_>)> =
        vec![("tmpfs", "tmpfs", FilesPlace::Plain(&source)), ("lone", "mount alone", FilesPlace::Mount(&lone, None))];
    match (&remote_ready, &node) {
        (Ok(()), Ok(node)) => {
            places.push(("remote", "mount of a node over veth", FilesPlace::Mount(&remote, Some(node))))
        }
        (Err(BenchError::Interrupted), _) => return Err(BenchError::Interrupted),
        (Err(e), _) | (Ok(()), Err(e)) => notes.push(format!("No mount of a node: {e}")),
    }

    let mut cases = Vec::new();
    for (threads, group) in [(1, "read all, 1 thread"), (8, "read all, 8 threads")] {
        for (variant, label, place) in &places {
            let case = BenchCase::new(group, variant, label, FigureUnit::Rate, move || {
                sample_files(suite, place, count, threads, false, 0)
            });
            cases.push(if *variant == "tmpfs" { case } else { case.against("of tmpfs", &["tmpfs"], None) });
        }
    }
    for (pass, group) in [(0, "stat all, 1 thread, cold"), (1, "stat all, 1 thread, hot")] {
        for (variant, label, place) in &places {
            cases.push(BenchCase::new(group, variant, label, FigureUnit::Rate, move || {
                sample_files(suite, place, count, 1, true, pass)
            }));
        }
    }
    for (pass, group) in [(0, "ls -l, cold"), (1, "ls -l, hot")] {
        for (variant, label, place) in &places {
            cases.push(BenchCase::new(group, variant, label, FigureUnit::Time, move || sample_ls(place, count, pass)));
        }
    }
    let rows = suite.rounds("files", cases)?;
    let title = "Many small files after a fresh mount of a warm cache, cache on tmpfs.";
    Ok(SuiteSection { name: "files", title, skipped: None, notes, rows })
}

/// Reads everything once and compares a part.
fn warm_up(suite: &BenchSuite, mounted: &MountUnderTest, count: usize) -> Result<()> {
    super::show_progress("files", "filling the cache");
    let words = ["files", &mounted.at().display().to_string(), "--threads", "4"].map(String::from);
    child::run_to_end(suite.part_command(&words, None), Duration::from_secs(300))?;
    (0..count)
        .step_by(97)
        .try_for_each(|i| scratch::check_file(&mounted.at().join(file_name(i)), i as u64, SMALL_FILE_BYTES))
}

/// The folder to read, and the mount to remove afterwards.
fn open_place(place: &FilesPlace<'_>) -> Result<(PathBuf, Option<MountUnderTest>)> {
    match place {
        FilesPlace::Plain(dir) => Ok((dir.to_path_buf(), None)),
        FilesPlace::Mount(mount, _) => {
            let mounted = mount()?;
            Ok((mounted.at().to_owned(), Some(mounted)))
        }
    }
}

fn place_roles<'a>(place: &'a FilesPlace<'_>, mounted: &'a Option<MountUnderTest>) -> Vec<super::CpuRole<'a>> {
    let mut roles: Vec<super::CpuRole<'a>> = mounted.iter().map(|m| ("mount", m.daemon())).collect();
    if let FilesPlace::Mount(_, Some(node)) = place {
        roles.push(("node", node.daemon()));
    }
    roles
}

/// The last of `pass + 1` passes over the folder of a fresh mount, as a sample.
fn sample_files(
    suite: &BenchSuite,
    place: &FilesPlace<'_>,
    count: usize,
    threads: usize,
    stat: bool,
    pass: usize,
) -> Result<CaseSample> {
    let (dir, mounted) = open_place(place)?;
    let mut words = ["files", &dir.display().to_string(), "--threads", &threads.to_string()].map(String::from).to_vec();
    words.extend(["--passes".into(), (pass + 1).to_string()]);
    words.extend(stat.then(|| "--stat".into()));
    let roles = place_roles(place, &mounted);
    let (done, mut cpu) =
        with_cpu(&roles, || child::run_to_end(suite.part_command(&words, None), Duration::from_secs(300)))?;
    cpu.push(("reader", done.cpu));
    let json: Value = serde_json::from_str(done.out.trim())
        .map_err(|e| BenchError::Failed(format!("the file reader printed {:?}: {e}", done.out)))?;
    let last = &json["passes"][pass];
    if number_in(last, "ops") as usize != count || number_in(last, "bytes") as u64 != count as u64 * SMALL_FILE_BYTES {
        return Err(BenchError::Failed(format!("not all files were read: {last}")));
    }
    // The processor time covers all passes, although only the first read anything.
    let bytes = if stat { 0 } else { number_in(last, "bytes") as u64 };
    let ops = count as u64 * (pass as u64 + 1);
    Ok(CaseSample { value: number_in(last, "ops") / number_in(last, "seconds"), bytes, ops, cpu, latency_us: None })
}

fn number_in(json: &Value, key: &str) -> f64 {
    json[key].as_f64().unwrap_or(0.0)
}

/// The last of `pass + 1` runs of `ls -l` on a fresh mount.
fn sample_ls(place: &FilesPlace<'_>, count: usize, pass: usize) -> Result<CaseSample> {
    let (dir, mounted) = open_place(place)?;
    let roles = place_roles(place, &mounted);
    let list = || {
        let mut command = Command::new("ls");
        // Numeric, so that no name service is measured.
        command.arg("-ln").arg(&dir).env("LC_ALL", "C");
        child::run_to_end(command, Duration::from_secs(120))
    };
    for _ in 0..pass {
        list()?;
    }
    let (done, mut cpu) = with_cpu(&roles, list)?;
    cpu.push(("reader", done.cpu));
    if done.out.lines().count() != count + 1 {
        return Err(BenchError::Failed(format!("ls printed {} lines for {} files", done.out.lines().count(), count)));
    }
    Ok(CaseSample { value: done.elapsed, bytes: 0, ops: count as u64, cpu, latency_us: None })
}
