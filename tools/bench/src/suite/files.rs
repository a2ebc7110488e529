//! Many small files after a fresh mount of a warm cache: read, open, stat, `ls`; alone and from a node.

use super::section::SuiteSection;
use super::setup::{BenchSuite, CpuRole, optional, with_cpu};
use crate::child;
use crate::error::{BenchError, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::netns::NamespacePair;
use crate::part::{FolderPass, PartOrder};
use crate::scratch::{self, file_name};
use crate::terminal::show_progress;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const FILES_LEN: u64 = 100 << 10;
const FILES_NODE_PORT: u16 = 7100;

/// Passes over all files: name, what happens, threads, and whether names are known without a listing.
const FILE_PASSES: [(&str, FolderPass, usize, bool); 7] = [
    ("read all, 1 thread", FolderPass::Read, 1, false),
    ("read all, 8 threads", FolderPass::Read, 8, false),
    ("open + read 4 KiB, 1 thread", FolderPass::Open, 1, false),
    ("open + read 4 KiB, 8 threads", FolderPass::Open, 8, false),
    ("stat after a listing, 1 thread", FolderPass::Stat, 1, false),
    ("stat by name, 1 thread", FolderPass::Stat, 1, true),
    ("stat by name, 8 threads", FolderPass::Stat, 8, true),
];

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
    let count = if suite.quick { 5_000 } else { 10_000 };
    let source = &suite.make_source("source-files", count, FILES_LEN)?;
    let mut notes = vec![format!("{count} files of 100 KiB in one folder, each time right after mounting.")];
    let plain =
        FilesPlace { suite, variant: "tmpfs", label: "tmpfs", source, count, words: None, net: None, node: None };
    let cache = suite.memory.empty_dir("cache-files")?;
    let words = ["--cache-dir", &cache, "--cache-size", "4G", "--free-space-ratio", "0", "--buffer-size", "300M"];
    let words = Some(words.map(String::from).to_vec());
    let lone = FilesPlace { variant: "lone", label: "mount alone", words, ..plain };
    lone.warm_up()?;
    let pair = NamespacePair::new();
    let node = pair.as_ref().map_err(Clone::clone).and_then(|pair| {
        let words = ["--writable", "--buffer-size", "300M", "--cache-size", "4G", "--free-space-ratio", "0"];
        suite.node(pair, FILES_NODE_PORT, source, &words)
    });
    let node = optional(&mut notes, "mount of a node", node)?;
    let net = pair.as_ref().ok().map(|pair| pair.client.as_str());
    let mut places = vec![plain, lone];
    if let Some(node) = &node {
        let words = vec!["--registry".to_owned(), format!("static:{}", node.addr)];
        let of_node = |variant, label, words| FilesPlace {
            suite,
            variant,
            label,
            source,
            count,
            words: Some(words),
            net,
            node: Some(node),
        };
        let remote = of_node("remote", "mount of a node over veth", words.clone());
        let remote = optional(&mut notes, "mount of a node", remote.warm_up().map(|()| remote))?;
        places.extend(remote);
        let words = [words, vec!["--rw".to_owned()]].concat();
        places.push(of_node("writable", "the same with --rw", words));
    }
    let mut cases = Vec::new();
    for (group, pass, threads, named) in FILE_PASSES {
        let named = named.then_some(count);
        cases.extend(places.iter().map(|place| place.case(group, move || place.read_sample(threads, pass, named))));
    }
    for (group, word) in [("ls", "-U1"), ("ls -l", "-Uln")] {
        cases.extend(places.iter().map(|place| place.case(group, move || place.list_sample(word))));
    }
    let title = "Many small files after a fresh mount of a warm cache, cache on tmpfs.";
    suite.measure("files", title, cases, notes)
}

impl<'a> FilesPlace<'a> {
    fn case(&'a self, group: &str, take: impl FnMut() -> Result<CaseSample> + 'a) -> BenchCase<'a> {
        let case = BenchCase::new(group, self.variant, self.label, FigureUnit::Rate, take);
        match self.variant {
            "tmpfs" => case,
            "writable" => case.against("of the mount that only reads", &["remote"], Some(0.95)),
            _ => case.against("of tmpfs", &["tmpfs"], None),
        }
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

    /// Reads everything once and compares a part.
    fn warm_up(&self) -> Result<()> {
        show_progress("files  filling the cache");
        let (dir, _mounted) = self.open()?;
        let order = PartOrder::ReadFolder { dir: dir.clone(), threads: 4, pass: FolderPass::Read, named: None };
        let command = self.suite.part_command(&order, None)?;
        child::run_to_end(command, Duration::from_secs(300))?;
        (0..self.count).step_by(97).try_for_each(|i| scratch::check_file(&dir.join(file_name(i)), i as u64, FILES_LEN))
    }

    /// A pass over the folder of a fresh mount.
    fn read_sample(&self, threads: usize, pass: FolderPass, named: Option<usize>) -> Result<CaseSample> {
        let (dir, mounted) = self.open()?;
        let order = PartOrder::ReadFolder { dir, threads, pass, named };
        let roles: Vec<CpuRole<'_>> = self.roles(&mounted);
        let sample = self.suite.part_sample(&order, None, FigureUnit::Rate, "reader", &roles)?;
        if sample.ops != self.count as u64 {
            return Err(BenchError::Failed(format!("{} files of {} were found", sample.ops, self.count)));
        }
        // Bytes are of interest only where all are read.
        let bytes = if pass == FolderPass::Read { sample.bytes } else { 0 };
        Ok(CaseSample { bytes, ..sample })
    }

    /// A run of `ls` on a fresh mount, as names per second.
    fn list_sample(&self, word: &str) -> Result<CaseSample> {
        let (dir, mounted) = self.open()?;
        let mut command = Command::new("ls");
        command.arg(word).arg(&dir).env("LC_ALL", "C");
        let listed = with_cpu(&self.roles(&mounted), || child::run_to_end(command, Duration::from_secs(120)));
        let (done, mut cpu) = listed?;
        cpu.push(("reader", done.cpu));
        let names = done.out.lines().filter(|line| line.ends_with(".bin")).count();
        if names != self.count {
            return Err(BenchError::Failed(format!("ls printed {names} names of {} files", self.count)));
        }
        Ok(CaseSample { value: names as f64 / done.elapsed, bytes: 0, ops: names as u64, cpu, latency_us: None })
    }
}
