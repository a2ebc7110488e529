//! Many small files after a fresh mount of a warm cache: read, stat, `ls -l`; alone and from a node.

use super::section::SuiteSection;
use super::setup::{BenchSuite, CpuRole, optional, with_cpu};
use crate::child;
use crate::error::{BenchError, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::netns::NamespacePair;
use crate::part::PartOrder;
use crate::scratch::{self, file_name};
use crate::terminal::show_progress;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const FILES_LEN: u64 = 100 << 10;
const FILES_NODE_PORT: u16 = 7100;

/// The file system under test: the source itself, or mounts of the source.
struct FilesPlace<'a> {
    suite: &'a BenchSuite,
    variant: &'static str,
    label: &'static str,
    source: &'a Path,
    count: usize,
    /// Arguments of a mount, which is made anew for every cold sample.
    words: Option<Vec<String>>,
    net: Option<&'a str>,
    node: Option<&'a NodeUnderTest>,
}

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let count = if suite.quick { 2_000 } else { 10_000 };
    let source = &suite.make_source("source-files", count, FILES_LEN)?;
    let mut notes =
        vec![format!("{count} files of 100 KiB in one folder; cold is right after mounting, hot the same again.")];
    let plain =
        FilesPlace { suite, variant: "tmpfs", label: "tmpfs", source, count, words: None, net: None, node: None };
    let cache = suite.memory.empty_dir("cache-files")?;
    let words = ["--cache-dir", &cache, "--cache-size", "4G", "--free-space-ratio", "0", "--buffer-size", "300M"];
    let words = Some(words.map(String::from).to_vec());
    let lone = FilesPlace { variant: "lone", label: "mount alone", words, ..plain };
    lone.warm_up()?;
    let pair = NamespacePair::new();
    let node = pair.as_ref().map_err(Clone::clone).and_then(|pair| {
        let words = ["--buffer-size", "300M", "--cache-size", "4G", "--free-space-ratio", "0"];
        suite.node(pair, FILES_NODE_PORT, source, &words)
    });
    let node = optional(&mut notes, "mount of a node", node)?;
    let remote = node.as_ref().map(|node| FilesPlace {
        suite,
        variant: "remote",
        label: "mount of a node over veth",
        source,
        count,
        words: Some(vec!["--registry".into(), format!("static:{}", node.addr)]),
        net: pair.as_ref().ok().map(|pair| pair.client.as_str()),
        node: Some(node),
    });
    let mut places = vec![plain, lone];
    if let Some(place) = remote {
        places.extend(optional(&mut notes, "mount of a node", place.warm_up().map(|()| place))?);
    }
    let mut cases = Vec::new();
    for (threads, group) in [(1, "read all, 1 thread"), (8, "read all, 8 threads")] {
        for place in &places {
            let case = place.case(group, FigureUnit::Rate, move || place.read_sample(threads, false, 0));
            cases.push(if place.words.is_none() { case } else { case.against("of tmpfs", &["tmpfs"], None) });
        }
    }
    for (pass, group) in [(0, "stat all, 1 thread, cold"), (1, "stat all, 1 thread, hot")] {
        let case = |place| FilesPlace::case(place, group, FigureUnit::Rate, move || place.read_sample(1, true, pass));
        cases.extend(places.iter().map(case));
    }
    for (pass, group) in [(0, "ls -l, cold"), (1, "ls -l, hot")] {
        let case = |place| FilesPlace::case(place, group, FigureUnit::Time, move || place.list_sample(pass));
        cases.extend(places.iter().map(case));
    }
    let title = "Many small files after a fresh mount of a warm cache, cache on tmpfs.";
    suite.measure("files", title, cases, notes)
}

impl<'a> FilesPlace<'a> {
    fn case(&'a self, group: &str, unit: FigureUnit, take: impl FnMut() -> Result<CaseSample> + 'a) -> BenchCase<'a> {
        BenchCase::new(group, self.variant, self.label, unit, take)
    }

    /// The folder to read, and the mount to remove afterwards.
    fn open(&self) -> Result<(PathBuf, Option<MountUnderTest>)> {
        let Some(words) = &self.words else { return Ok((self.source.to_owned(), None)) };
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mounted = self.suite.mount(&format!("files-{}", self.variant), self.source, self.net, &words)?;
        Ok((mounted.at().to_owned(), Some(mounted)))
    }

    fn roles(&self, mounted: &'a Option<MountUnderTest>) -> Vec<CpuRole<'a>> {
        let mount = mounted.iter().map(|mounted| ("mount", mounted.daemon()));
        mount.chain(self.node.map(|node| ("node", node.daemon()))).collect()
    }

    fn order(&self, dir: PathBuf, threads: usize, stat: bool, passes: usize) -> PartOrder {
        PartOrder::ReadFolder { dir, threads, stat, passes }
    }

    /// Reads everything once and compares a part.
    fn warm_up(&self) -> Result<()> {
        show_progress("files  filling the cache");
        let (dir, _mounted) = self.open()?;
        let command = self.suite.part_command(&self.order(dir.clone(), 4, false, 1), None)?;
        child::run_to_end(command, Duration::from_secs(300))?;
        (0..self.count).step_by(97).try_for_each(|i| scratch::check_file(&dir.join(file_name(i)), i as u64, FILES_LEN))
    }

    /// The last of `pass + 1` passes over the folder of a fresh mount, as a sample.
    fn read_sample(&self, threads: usize, stat: bool, pass: usize) -> Result<CaseSample> {
        let (dir, mounted) = self.open()?;
        let order = self.order(dir, threads, stat, pass + 1);
        let roles: Vec<CpuRole<'_>> = self.roles(&mounted);
        let sample = self.suite.part_sample(&order, None, FigureUnit::Rate, "reader", &roles)?;
        if sample.ops != self.count as u64 || sample.bytes != self.count as u64 * FILES_LEN {
            return Err(BenchError::Failed(format!("{} files with {} bytes were read", sample.ops, sample.bytes)));
        }
        // The processor time covers all passes, although only the first read anything.
        let bytes = if stat { 0 } else { sample.bytes };
        Ok(CaseSample { bytes, ops: sample.ops * (pass as u64 + 1), ..sample })
    }

    /// The last of `pass + 1` runs of `ls -l` on a fresh mount.
    fn list_sample(&self, pass: usize) -> Result<CaseSample> {
        let (dir, mounted) = self.open()?;
        let roles: Vec<CpuRole<'_>> = self.roles(&mounted);
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
        let lines = done.out.lines().count();
        if lines != self.count + 1 {
            return Err(BenchError::Failed(format!("ls printed {lines} lines for {} files", self.count)));
        }
        Ok(CaseSample { value: done.elapsed, bytes: 0, ops: self.count as u64, cpu, latency_us: None })
    }
}
