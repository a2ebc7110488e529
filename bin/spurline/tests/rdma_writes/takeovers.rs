//! Mounts with `--recover` over rails: the process is killed again and again under readers, or under writers, which see no
//! error, and each further process uses the rails again.

use crate::writes::BlockFile;
use spurline_rig::rdma_rig::{Rig, ask};
use spurline_rig::steady_work::{SteadyWork, WorkEnd};
use std::path::Path;
use std::sync::atomic::AtomicBool;

const KILLS: usize = 10;
const RAILS: [&str; 2] = ["--rdma-network", "rail0:rail1"];

#[test]
#[ignore = "runs in the virtual machine"]
fn takeover_of_a_mount_whose_readers_compare_checksums() {
    let rig = Rig::at(Path::new("/vmtmp/readers"));
    rig.fill();
    let ports = [7150, 7151];
    let _nodes = ports.map(|port| rig.node(port, &RAILS));
    let mount = rig.mount("reads", &ports, &[&RAILS[..], &["--recover"]].concat());
    mount.wait("all paths", |m| m.count("rdma", "paths_up") == 4);
    let fio = mount.fio();
    mount.wait_bytes("reads over the rails", 4, false);
    let mut over_tcp = Vec::new();
    for _ in 0..KILLS {
        mount.replace_process(4, "recv_bytes", 8 << 20);
        over_tcp.push(mount.received().1);
    }
    fio.end();
    mount.pass();
    assert_eq!(mount.carries(), "rdma");
    println!("readers of {KILLS} processes: pauses of {:?} ms; bytes over TCP {over_tcp:?}", mount.pauses());
    assert_eq!(ask(&mount.log, "status")["keeper"]["restarts"], KILLS);
}

/// Writes blocks, and syncs now and then.
fn write_blocks(work: &SteadyWork<'_>, number: usize) -> BlockFile {
    let mut file = BlockFile::open(&work.at, number);
    while work.goes_on() {
        if file.step() {
            file.sync().expect("a writer sees no error");
        }
    }
    file.sync().expect("a writer sees no error");
    file
}

/// What writers had acknowledged at the end.
struct Written {
    blocks: [BlockFile; 2],
    records: u64,
    files: u64,
}

#[test]
#[ignore = "runs in the virtual machine"]
fn takeover_of_a_mount_whose_writers_lose_nothing() {
    let rig = Rig::at(Path::new("/vmtmp/writers"));
    let ports = [7160, 7161];
    let _nodes = ports.map(|port| rig.node(port, &[&RAILS[..], &["--writable"]].concat()));
    let mount = rig.mount("writes", &ports, &[&RAILS[..], &["--rw", "--recover"]].concat());
    mount.wait("all paths", |m| m.count("rdma", "paths_up") == 4);
    let stop = AtomicBool::new(false);
    let work = SteadyWork::new(&mount.at, &stop);
    let mut over_tcp = Vec::new();
    let written = std::thread::scope(|scope| {
        let end = WorkEnd(&stop);
        let work = &work;
        let blocks = [0, 1].map(|number| scope.spawn(move || write_blocks(work, number)));
        let records = scope.spawn(|| work.append_records());
        let files = scope.spawn(|| work.replace_files());
        for _ in 0..KILLS {
            mount.replace_process(4, "send_bytes", 4 << 20);
            over_tcp.push(mount.count("tcp", "send_bytes"));
        }
        drop(end);
        Written {
            blocks: blocks.map(|writer| writer.join().unwrap()),
            records: records.join().unwrap(),
            files: files.join().unwrap(),
        }
    });
    let Written { blocks, records, files } = written;
    println!(
        "writers of {KILLS} processes: pauses of {:?} ms; {records} records, {files} files; bytes over TCP {over_tcp:?}",
        mount.pauses()
    );
    let source = rig.dir.join("src");
    blocks.iter().for_each(|file| file.check(&source));
    SteadyWork::check_records(&source, records);
    SteadyWork::check_files(&source, files);
    assert_eq!(ask(&mount.log, "status")["keeper"]["restarts"], KILLS);
}
