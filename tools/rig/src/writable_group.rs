//! Writable mounts for the tests: alone, or through nodes over one directory, which can be a small file system in memory;
//! and the programs that run on them.

use crate::world::*;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The ways of a lone mount: the kernel's transports, with the source's file in the kernel and without.
pub const WAYS: [&[&str]; 3] =
    [&[], &["--no-passthrough", "--fuse-io", "dev"], &["--no-passthrough", "--fuse-io", "uring"]];

/// Nodes over one directory; without any, the directory of lone mounts.
pub struct Group {
    pub nodes: Vec<Node>,
    pub source: PathBuf,
    _memory: Option<TmpFs>,
    pub world: World,
}

impl Group {
    pub fn start(count: usize) -> Option<Group> {
        Group::start_over(count, None)
    }

    /// The same over a file system in memory of this size.
    pub fn start_in_memory(count: usize, size: &str) -> Option<Group> {
        Group::start_over(count, Some(size))
    }

    fn start_over(count: usize, size: Option<&str>) -> Option<Group> {
        if !can_mount() {
            return None;
        }
        let world = World::new();
        let source = world.dir("source");
        let memory = size.map(|size| TmpFs::mount(&source, &format!("size={size}")));
        for path in [&world.path(""), &source] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Some(Group { _memory: memory, ..Group::start_at(count, world, source) })
    }

    /// The same over a directory that is there.
    pub fn start_at(count: usize, world: World, source: PathBuf) -> Group {
        let mut group = Group { nodes: Vec::new(), source, _memory: None, world };
        for n in 0..count {
            let node = group.node(n, 0);
            group.nodes.push(node);
        }
        group
    }

    pub fn node(&self, n: usize, port: u16) -> Node {
        let cache = self.world.dir(&format!("node-cache-{n}"));
        let source = self.source.to_str().unwrap();
        let port = port.to_string();
        let words = ["node", "--writable", "--source", source, "--group-port", &port, "--cache-dir"];
        let mut command = self.world.command(&words);
        self.world.node_with(command.arg(cache))
    }

    /// A mount whose list of nodes begins with the one at `first`. Unless `more` names a transport to the kernel, mounts of even
    /// numbers use /dev/fuse and the others io_uring, so that two mounts cover both; `SPURLINE_FUSE_IO` sets one for all.
    pub fn mount(&self, name: &str, first: usize, more: &[&str]) -> Mount {
        let at = self.world.dir(name);
        let mut command = self.world.command(&["mount", self.source.to_str().unwrap(), at.to_str().unwrap(), "--rw"]);
        if self.nodes.is_empty() {
            command.arg("--cache-dir").arg(self.world.dir(&format!("cache-{name}")));
        } else {
            let mut nodes: Vec<&str> = self.nodes.iter().map(|node| node.address.as_str()).collect();
            nodes.rotate_left(first);
            command.args(["--registry", &format!("static:{}", nodes.join(","))]);
        }
        if !more.contains(&"--fuse-io") {
            let of_number = if first.is_multiple_of(2) { "dev" } else { "uring" };
            command.args(["--fuse-io", &std::env::var("SPURLINE_FUSE_IO").unwrap_or(of_number.into())]);
        }
        self.world.mount_at(command.args(["-o", "allow_other"]).args(more), &at)
    }
}

/// A small file system in memory; taken away when dropped.
pub struct TmpFs(pub PathBuf);

impl TmpFs {
    pub fn mount(at: &Path, options: &str) -> TmpFs {
        let out = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        TmpFs(at.to_owned())
    }
}

impl Drop for TmpFs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A program that a test needs; prints the reason if it is not there.
pub fn has(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().unwrap().status.success();
    if !found {
        skip(program, &format!("{program} is not installed"));
    }
    found
}

/// Runs a script in `at`, which is its home too; returns what it printed.
pub fn shell(at: &Path, script: &str) -> String {
    let out = Command::new("sh").args(["-ec", script]).current_dir(at).env("HOME", at).output().unwrap();
    assert!(out.status.success(), "{script}: {out:?}");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// A random number below a limit, the same for the same state.
pub fn draw(state: &mut u64, below: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % below.max(1)
}
