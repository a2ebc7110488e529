//! Writers on nodes that are killed, stopped and cut off, and on a full source: fio writes and verifies all the while, and
//! what is durable is in the source. The longest of the timed writes is printed.

use rustix::process::Signal;
use spurline_rig::lan::Lan;
use spurline_rig::world::*;
use spurline_rig::writable_group::{Group, draw, has};
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Hosts of the test: two nodes, then the client.
const NODES: usize = 2;
const CLIENT: usize = NODES;

/// One writer: its file, the order of its blocks, and its options.
struct Job {
    file: &'static str,
    words: &'static [&'static str],
}

const JOBS: [Job; 4] = [
    Job { file: "random", words: &["--rw=randwrite", "--bs=64k", "--fsync=16"] },
    Job { file: "small", words: &["--rw=randwrite", "--bs=16k", "--fdatasync=100"] },
    Job { file: "direct", words: &["--rw=write", "--bs=1m", "--fdatasync=4", "--direct=1"] },
    Job { file: "sequential", words: &["--rw=write", "--bs=128k"] },
];

/// Files of the timed writer.
const PROBES: usize = 8;

/// What the writers did so far.
#[derive(Default)]
struct Passes {
    done: [AtomicU64; JOBS.len()],
    longest_us: AtomicU64,
    stop: AtomicBool,
}

impl Passes {
    /// Waits until every writer has finished this many more passes; returns the longest timed write meanwhile.
    fn go_on(&self, more: u64) -> Duration {
        let until: Vec<u64> = self.done.iter().map(|done| done.load(Ordering::Acquire) + more).collect();
        let start = Instant::now();
        while !self.done.iter().zip(&until).all(|(done, until)| done.load(Ordering::Acquire) >= *until) {
            assert!(start.elapsed() < PATIENCE * 2 && !self.stop.load(Ordering::Acquire), "a writer does not go on");
            std::thread::sleep(Duration::from_millis(5));
        }
        Duration::from_micros(self.longest_us.swap(0, Ordering::Relaxed))
    }
}

/// fio with the words that the writer and the verifier of a pass share.
fn fio(world: &World, file: &Path, job: &Job, pass: u64) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=w", "--size=16m", "--ioengine=psync", "--verify=crc32c", "--verify_fatal=1"]);
    command.args([&format!("--randseed={}", pass + 1), "--filename"]).arg(file);
    command.args(job.words).current_dir(world.dir("fio"));
    command
}

/// Writes the job's file again and again; each pass is verified through the mount and in the source.
fn write_on(world: &World, source: &Path, mount: &Path, number: usize, passes: &Passes) {
    let job = &JOBS[number];
    let mut pass = 0;
    loop {
        if passes.stop.load(Ordering::Acquire) {
            return;
        }
        let out =
            fio(world, &mount.join(job.file), job, pass).args(["--do_verify=1", "--end_fsync=1"]).output().unwrap();
        let said = || format!("{}{}", String::from_utf8_lossy(&out.stderr), String::from_utf8_lossy(&out.stdout));
        assert!(out.status.success(), "fio wrote {} in pass {pass}: {}", job.file, said());
        let out = fio(world, &source.join(job.file), job, pass).arg("--verify_only").output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "fio verified {} in the source, pass {pass}: {said}", job.file);
        pass += 1;
        passes.done[number].fetch_add(1, Ordering::Release);
    }
}

/// Writes short records to open files in turn, on all nodes, and times each; returns the last record of each.
fn probe(mount: &Path, passes: &Passes) -> [u64; PROBES] {
    let open = |n| File::create(mount.join(format!("probe-{n}"))).unwrap();
    let files: [File; PROBES] = std::array::from_fn(open);
    let mut last = [0; PROBES];
    for record in 1u64.. {
        if passes.stop.load(Ordering::Acquire) {
            break;
        }
        let n = record as usize % PROBES;
        let start = Instant::now();
        files[n].write_all_at(&record.to_le_bytes(), record * 8).unwrap();
        passes.longest_us.fetch_max(start.elapsed().as_micros() as u64, Ordering::Relaxed);
        last[n] = record;
        std::thread::sleep(Duration::from_millis(1));
    }
    last
}

/// Stops the writers however the test ends.
struct StopOnDrop<'a>(&'a Passes);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Release);
    }
}

#[test]
fn writers_live_through_what_happens_to_nodes() {
    if !can_mount() || !has("fio") {
        return;
    }
    let Some(lan) = Lan::new(NODES + 1) else { return };
    let world = World::new();
    let source = world.dir("source");
    let token = world.file("token", b"the group's q5Ykm0WJ7b2uR1xTzv9sLd3f\n");
    rustix::fs::chmod(&token, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let (source_text, token) = (source.to_str().unwrap(), token.to_str().unwrap());
    let node = |n: usize| {
        let mut command = world.command(&["node", "--writable", "--source", source_text, "--group-port", "7000"]);
        command.args(["--group-token-file", token, "--group-network", &Lan::ip(n), "--cache-dir"]);
        world.node_with(&mut lan.on(n, command.arg(world.dir(&format!("cache-{n}")))))
    };
    let mut nodes: Vec<Node> = (0..NODES).map(node).collect();
    let at = world.dir("mnt");
    let registry: Vec<_> = (0..NODES).map(|n| format!("{}:7000", Lan::ip(n))).collect();
    let registry = format!("static:{}", registry.join(","));
    let mut command = world.command(&["mount", source_text, at.to_str().unwrap(), "--rw", "--registry", &registry]);
    command.args(["--group-token-file", token, "--peer-silence", "1s"]);
    let mount = world.mount_at(&mut lan.on(CLIENT, &command), &at);
    let passes = Passes::default();
    let last = std::thread::scope(|scope| {
        let _stop = StopOnDrop(&passes);
        for number in 0..JOBS.len() {
            let (world, source, at, passes) = (&world, &source, &at, &passes);
            scope.spawn(move || {
                let _stop = StopOnDrop(passes);
                write_on(world, source, at, number, passes);
            });
        }
        let probes = scope.spawn(|| {
            let _stop = StopOnDrop(&passes);
            probe(&at, &passes)
        });
        let mut state = 7;
        let mut step = |what: &str| {
            println!("the longest write: {:?} {what}", passes.go_on(1));
            // Faults come at any phase of a pass.
            std::thread::sleep(Duration::from_millis(draw(&mut state, 400)));
        };
        step("at first");
        for n in [0, 1] {
            nodes[n].process.kill();
            step("with a node killed");
            nodes[n] = node(n);
            step("when it is back");
        }
        for n in [1, 0] {
            nodes[n].process.signal(Signal::STOP);
            step("with a node stopped");
            nodes[n].process.signal(Signal::CONT);
            step("when it goes on");
        }
        for n in [0, 1] {
            lan.cable(n, false);
            step("with a node's cable out");
            lan.cable(n, true);
            step("when it is in again");
        }
        lan.spoil(1);
        step("with a node whose link loses and delays");
        lan.mend(1);
        passes.stop.store(true, Ordering::Release);
        probes.join().unwrap()
    });
    let done: u64 = passes.done.iter().map(|done| done.load(Ordering::Relaxed)).sum();
    let resent = mount.count("writes", "resent_bytes");
    println!("{done} passes of fio, each verified; {resent} bytes sent again");
    mount.unmount();
    for (n, last) in last.into_iter().enumerate() {
        let text = fs::read(source.join(format!("probe-{n}"))).unwrap();
        assert_eq!(text.len() as u64, last * 8 + 8, "probe {n}");
        for record in (1..=last).filter(|record| *record as usize % PROBES == n) {
            assert!(text[record as usize * 8..][..8] == record.to_le_bytes(), "probe {n}, record {record}");
        }
    }
}

/// What was synced before the source was full is there; with space again, writing goes on.
#[test]
fn a_source_that_fills_up_loses_nothing_that_was_synced() {
    for nodes in [0, 2] {
        let Some(group) = Group::start_in_memory(nodes, "24m") else { return };
        let mount = group.mount("mnt", 0, &["--no-passthrough"]);
        let filler = group.source.join("filler");
        fs::write(&filler, vec![7; 8 * MIB]).unwrap();
        let block = |n: u64| bytes(n, MIB);
        let open = || OpenOptions::new().create(true).write(true).truncate(false).open(mount.path("file")).unwrap();
        let put = |file: &File, n: u64| {
            file.write_all_at(&block(n), n * MIB as u64)?;
            file.sync_data()
        };
        let (file, mut synced) = (open(), 0);
        let error = loop {
            match put(&file, synced) {
                Ok(()) => synced += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{nodes} nodes, block {synced}: {error}");
        assert!((8..=16).contains(&synced), "{nodes} nodes: {synced} blocks fit");
        drop(file);
        let check = |count: u64| {
            for path in [mount.path("file"), group.source.join("file")] {
                let text = fs::read(&path).unwrap();
                let whole = (0..count).all(|n| text[n as usize * MIB..][..MIB] == block(n)[..]);
                assert!(whole, "{nodes} nodes, {count} blocks: {}", path.display());
            }
        };
        check(synced);
        // Names and attributes work on; so do writes when there is space.
        fs::rename(mount.path("file"), mount.path("other")).unwrap();
        fs::rename(mount.path("other"), mount.path("file")).unwrap();
        fs::remove_file(&filler).unwrap();
        let file = open();
        (synced..synced + 6).for_each(|n| put(&file, n).unwrap());
        drop(file);
        check(synced + 6);
        mount.unmount();
    }
}

/// Changes end as well, and are made once or not at all. A process that waits in execve(2), whose files the kernel closes, holds up no
/// other: the kernel gives some of its files in /proc only after that.
#[test]
fn signals_end_programs_that_change_files_while_their_node_is_stopped() {
    let Some(group) = Group::start(1) else { return };
    for transport in ["dev", "uring"] {
        let mount = group.mount(transport, 0, &["--fuse-io", transport]);
        let at = mount.at.to_str().unwrap();
        for name in ["old", "gone", "kept"] {
            fs::write(mount.path(name), name).unwrap();
        }
        let start = |program: &str, script: &str| {
            let mut command = Command::new(program);
            command.args(["-c", script, at]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
            command.spawn().unwrap()
        };
        let go_on = |program: &mut Child| program.stdin.take().unwrap().write_all(b"\n").unwrap();
        let opened = |program: &mut Child| program.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        // Before the first write of a file that was made a while ago, the kernel requests capabilities, from the node.
        let starts_another = "import subprocess, sys; f = open(sys.argv[1] + '/held', 'w')\n\
             def write(): f.write('x'); f.flush()\n\
             write(); print(flush=True); sys.stdin.readline(); write(); subprocess.run(['true'], close_fds=False)";
        let mut starter = start("python3", starts_another);
        let mut writer = start("bash", "exec 3>>\"$0/kept\"; echo; read; echo line >&3");
        opened(&mut starter);
        opened(&mut writer);
        group.nodes[0].process.signal(Signal::STOP);
        go_on(&mut starter);
        let children = format!("/proc/{0}/task/{0}/children", starter.id());
        eventually("it starts a program", || !fs::read_to_string(&children).unwrap().is_empty());
        let child: u32 = fs::read_to_string(&children).unwrap().trim().parse().unwrap();
        go_on(&mut writer);
        let end = |mut program: Child| {
            wait_for_request(&program);
            program.kill().unwrap();
            program.wait().unwrap();
        };
        end(writer);
        // One by one: the kernel itself makes changes in one directory wait for each other.
        for change in
            ["mkdir $0/d", "mv $0/old $0/new", "rm $0/gone", "dd if=/dev/zero of=$0/made bs=1M count=2 conv=fsync"]
        {
            end(start("bash", &format!("exec {change}")));
        }
        send(child, Signal::KILL);
        starter.kill().unwrap();
        starter.wait().unwrap();
        group.nodes[0].process.signal(Signal::CONT);
        let kept = fs::read_to_string(mount.path("kept")).unwrap();
        assert!(["kept", "keptline\n"].contains(&kept.as_str()), "{kept}");
        let names = [mount.path("old"), mount.path("new")].map(|path| path.exists());
        assert!(names[0] != names[1], "{names:?}");
        mount.unmount();
        for name in ["old", "new", "gone", "kept", "made", "held"] {
            let _ = fs::remove_file(group.source.join(name));
        }
        let _ = fs::remove_dir(group.source.join("d"));
    }
}
