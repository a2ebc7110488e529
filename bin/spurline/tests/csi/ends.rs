//! Mount processes, their keepers and the driver end: restarts, replacements, dead and hung mounts, and what readers, writers and
//! containers see of it.

use crate::{stage_bucket, written_by_many};
use spurline_csi::pb;
use spurline_rig::driver::{DriverRig, capability_of};
use spurline_rig::program::wait_for;
use spurline_testkit::S3Server;
use std::collections::HashMap;
use std::fs::TryLockError;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;

#[test]
fn a_restarted_driver_finds_its_mounts_and_readers_see_nothing_of_it() {
    let Some(mut rig) = DriverRig::new() else { return };
    let attributes = rig.attributes();
    rig.stage("pv", &attributes).unwrap();
    rig.publish("pv", "a", &attributes).unwrap();
    let process = rig.processes();
    let reader = {
        use std::os::unix::fs::FileExt as _;
        let file = std::fs::File::open(rig.target("a").join("file")).unwrap();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let reads = std::thread::spawn(move || {
            let mut count = 0;
            while stopped.try_recv().is_err() {
                let mut text = [0; 21];
                file.read_exact_at(&mut text, 0).unwrap();
                assert_eq!(&text, b"hello from the source");
                count += 1;
            }
            count
        });
        (stop, reads)
    };
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::KILL] {
        let inner = Arc::get_mut(&mut rig).unwrap();
        inner.end_driver(signal);
        inner.start();
    }
    assert_eq!(rig.processes(), process);
    rig.publish("pv", "b", &attributes).unwrap();
    assert!(rig.read("b").is_ok());
    reader.0.send(()).unwrap();
    assert!(reader.1.join().unwrap() > 0);
    for pod in ["a", "b"] {
        rig.unpublish("pv", pod).unwrap();
    }
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

#[test]
fn a_dead_mount_process_is_replaced_and_the_cause_reported() {
    let Some(rig) = DriverRig::new() else { return };
    let attributes = without_recovery(&rig);
    rig.stage("pv", &attributes).unwrap();
    rig.publish("pv", "a", &attributes).unwrap();
    let before = rig.processes();
    rig.signal(before[0], rustix::process::Signal::KILL);
    wait_for("the replaced mount", || rig.read("a").is_ok());
    assert_ne!(rig.processes(), before);
    wait_for("the condition", || {
        rig.condition("pv", "a").is_ok_and(|now| !now.abnormal && now.message.contains("signal: 9"))
    });
    let log = std::fs::read_to_string(rig.path("driver.log")).unwrap();
    assert!(log.contains("VolumeMountEnded") && log.contains("VolumeMountReplaced"), "{log}");
    rig.unpublish("pv", "a").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

/// The attributes of a volume whose mount ends with its process.
fn without_recovery(rig: &DriverRig) -> HashMap<String, String> {
    let mut attributes = rig.attributes();
    attributes.insert("mountOptions".into(), "cache-size=0,metrics=none,norecover".into());
    attributes
}

/// A call for another pod, or the next driver, can be the first to see that a mount is dead.
#[test]
fn every_pod_gets_a_mount_that_any_call_has_replaced() {
    let Some(mut rig) = DriverRig::new() else { return };
    let attributes = without_recovery(&rig);
    for way in ["publish", "stage", "watch"] {
        rig.stage("pv", &attributes).unwrap();
        rig.publish("pv", "a", &attributes).unwrap();
        let written = std::fs::read_to_string(rig.path("driver.log")).unwrap().len();
        // No watch sees the end.
        let inner = Arc::get_mut(&mut rig).unwrap();
        inner.end_driver(rustix::process::Signal::KILL);
        rig.kill_mounts();
        wait_for("the end", || rig.processes().is_empty());
        Arc::get_mut(&mut rig).unwrap().start();
        match way {
            "publish" => rig.publish("pv", "b", &attributes).unwrap(),
            "stage" => rig.stage("pv", &attributes).unwrap(),
            _ => {}
        }
        wait_for("the mount of the first pod", || rig.read("a").is_ok());
        let said = "its process was replaced because";
        wait_for("the condition", || {
            rig.condition("pv", "a").is_ok_and(|now| !now.abnormal && now.message.contains(said))
        });
        let log = std::fs::read_to_string(rig.path("driver.log")).unwrap();
        for event in ["VolumeMountEnded: ", "VolumeMountReplaced: "] {
            assert_eq!(log[written..].matches(event).count(), 1, "{way}: {log}");
        }
        if way == "publish" {
            assert!(rig.read("b").is_ok());
            rig.unpublish("pv", "b").unwrap();
        }
        rig.unpublish("pv", "a").unwrap();
        rig.unstage("pv").unwrap();
        rig.check_empty();
    }
}

/// A driver that ended between two binds, or a bind that failed, leaves a directory without the mount of the others.
#[test]
fn a_directory_without_the_mount_is_named_and_gets_it() {
    let Some(rig) = DriverRig::new() else { return };
    let attributes = without_recovery(&rig);
    rig.stage("pv", &attributes).unwrap();
    for pod in ["a", "b"] {
        rig.publish("pv", pod, &attributes).unwrap();
    }
    let process = rig.processes();
    let target = rig.target("a");
    // A file in the place of the directory, until the driver has tried.
    let driver = i32::try_from(rig.pid()).unwrap();
    rig.signal(driver, rustix::process::Signal::STOP);
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::DETACH).unwrap();
    std::fs::remove_dir_all(&target).unwrap();
    std::fs::write(&target, b"no directory").unwrap();
    rig.signal(driver, rustix::process::Signal::CONT);
    let named = target.display().to_string();
    wait_for("the condition", || {
        rig.condition("pv", "a").is_ok_and(|now| now.abnormal && now.message.contains(&named))
    });
    assert!(!rig.condition("pv", "b").unwrap().abnormal && rig.read("b").is_ok());
    std::fs::remove_file(&target).unwrap();
    wait_for("the directory's mount", || rig.read("a").is_ok());
    wait_for("the condition", || rig.condition("pv", "a").is_ok_and(|now| !now.abnormal));
    assert_eq!(rig.processes(), process, "no other process");
    for pod in ["a", "b"] {
        rig.unpublish("pv", pod).unwrap();
    }
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

/// Reads an open file from the mount, not from the kernel's cache.
fn read_again(file: &std::fs::File) -> Vec<u8> {
    use std::os::unix::fs::FileExt as _;
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut text = vec![0; 21];
    file.read_exact_at(&mut text, 0).unwrap();
    text
}

#[test]
fn open_files_of_pods_outlive_the_processes_of_their_mount_and_of_the_driver() {
    use rustix::process::Signal;
    let Some(mut rig) = DriverRig::new() else { return };
    let attributes = rig.attributes();
    rig.stage("pv", &attributes).unwrap();
    rig.publish("pv", "a", &attributes).unwrap();
    let file = std::fs::File::open(rig.target("a").join("file")).unwrap();
    let device = std::fs::metadata(rig.target("a")).unwrap().dev();
    let events = |rig: &DriverRig, reason: &str| {
        std::fs::read_to_string(rig.path("driver.log")).unwrap().matches(&format!("{reason}: ")).count()
    };
    let check = |rig: &DriverRig| {
        assert_eq!(read_again(&file), b"hello from the source");
        assert_eq!(std::fs::metadata(rig.target("a")).unwrap().dev(), device, "it is the same mount");
        assert_eq!(rig.launched().len(), 1);
    };

    // The keeper replaces the process.
    let keeper = rig.launched();
    rig.signal(rig.servers()[0], Signal::KILL);
    wait_for("the event", || events(&rig, "VolumeMountRestarted") == 1);
    check(&rig);
    assert_eq!(rig.launched(), keeper);
    let wanted = "its process ended: signal: 9";
    wait_for("the condition", || {
        rig.condition("pv", "a").is_ok_and(|now| !now.abnormal && now.message.contains(wanted))
    });

    // The driver replaces both, as after the end of a container, also after an end of the driver.
    for round in 1..=2 {
        rig.kill_mounts();
        wait_for("the event", || events(&rig, "VolumeMountReplaced") == round);
        check(&rig);
        let inner = Arc::get_mut(&mut rig).unwrap();
        inner.end_driver(if round == 1 { Signal::KILL } else { Signal::TERM });
        inner.start();
        wait_for_store(&rig);
    }
    // A pod that is deleted gets a signal.
    let keeper = rig.launched();
    rig.signal(keeper[0], Signal::TERM);
    wait_for("the event", || events(&rig, "VolumeMountReplaced") == 3);
    check(&rig);
    assert_ne!(rig.launched(), keeper);
    assert_eq!(events(&rig, "VolumeMountRestarted"), 1, "each end is reported once");

    // An open file does not keep the volume.
    rig.unpublish("pv", "a").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
    drop(file);
}

/// A node that takes changes of the rig's source, and the registry of the node.
fn start_node(rig: &DriverRig) -> (Child, String) {
    let log = rig.path("node.log");
    let mut command = spurline_rig::program::spurline();
    command.args(["node", "--writable", "--group-port", "0", "--metrics", "none", "--cache-size", "0", "--source"]);
    command.arg(rig.path("src")).stderr(std::fs::File::create(&log).unwrap());
    let node = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let address = || {
        let text = std::fs::read_to_string(&log).unwrap();
        let line = text.lines().find(|line| line.contains("over tcp"))?;
        line.split("serving on ").nth(1)?.split(' ').next().map(str::to_owned)
    };
    wait_for("the node", || address().is_some());
    (node, format!("static:{}", address().unwrap()))
}

/// A log in a volume that pods write, open and locked.
struct LockedLog {
    file: std::fs::File,
    path: PathBuf,
    device: u64,
    written: String,
}

impl LockedLog {
    /// In a new volume with more attributes than those of the rig.
    fn open(rig: &DriverRig, more: &[(&str, String)]) -> LockedLog {
        let mut attributes = rig.attributes();
        attributes.insert("mountOptions".into(), "cache-size=0,metrics=none,rw".into());
        attributes.extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        rig.stage_as("pv", &attributes, written_by_many()).unwrap();
        LockedLog::open_in(rig, &attributes)
    }

    /// In a staged volume with these attributes.
    fn open_in(rig: &DriverRig, attributes: &HashMap<String, String>) -> LockedLog {
        rig.publish_as("pv", "a", attributes, written_by_many(), false).unwrap();
        let path = rig.target("a").join("log");
        let file = std::fs::File::options().create(true).append(true).open(&path).unwrap();
        let device = file.metadata().unwrap().dev();
        file.lock().unwrap();
        LockedLog { file, path, device, written: String::new() }
    }

    fn write(&mut self, round: u32) {
        let line = format!("line {round}\n");
        self.file.write_all(line.as_bytes()).unwrap();
        self.written.push_str(&line);
    }

    fn check(&self) {
        self.file.sync_all().unwrap();
        assert_eq!(std::fs::read_to_string(&self.path).unwrap(), self.written);
        let other = std::fs::File::open(&self.path).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)), "the lock stays");
    }

    fn check_mount(&self) {
        assert_eq!(std::fs::metadata(&self.path).unwrap().dev(), self.device, "it is the same mount");
    }
}

fn end_volume(rig: &DriverRig) {
    rig.unpublish("pv", "a").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

/// Writes while the mount's process, its keeper, the whole mount pod and the driver end.
fn write_beside_ends(rig: &mut Arc<DriverRig>, log: &mut LockedLog) {
    use rustix::process::Signal;
    for round in 0..5 {
        log.write(round);
        let keeper = rig.launched();
        match round {
            0 => rig.signal(rig.servers()[0], Signal::KILL),
            // As after the end of a container.
            1 => rig.kill_mounts(),
            2 => {
                let inner = Arc::get_mut(rig).unwrap();
                inner.end_driver(Signal::KILL);
                inner.start();
                wait_for_store(rig);
                // The open files follow.
                std::thread::sleep(std::time::Duration::from_secs(1));
                rig.kill_mounts();
            }
            // A pod that is deleted gets a signal.
            3 => {
                let noticed = format!("is mounted by {}:", keeper[0]);
                wait_for("the driver notices the last pod", || {
                    std::fs::read_to_string(rig.path("driver.log")).unwrap().contains(&noticed)
                });
                rig.signal(keeper[0], Signal::TERM);
                wait_for("the next keeper", || rig.launched().len() == 1 && rig.launched() != keeper);
            }
            _ => {}
        }
        log.check();
        if round == 0 {
            assert_eq!(rig.launched(), keeper, "the keeper has replaced the process");
        }
    }
    log.check_mount();
}

#[test]
fn writers_through_nodes_outlive_the_processes_of_their_mount_and_of_the_driver() {
    let Some(mut rig) = DriverRig::new() else { return };
    let (mut node, registry) = start_node(&rig);
    let mut log = LockedLog::open(&rig, &[("registry", registry)]);
    write_beside_ends(&mut rig, &mut log);
    assert_eq!(std::fs::read_to_string(rig.path("src/log")).unwrap(), log.written);
    drop(log);
    end_volume(&rig);
    node.kill().unwrap();
    node.wait().unwrap();
}

/// Without nodes, the driver holds the open files for the next mount pod.
#[test]
fn writers_of_a_directory_outlive_the_processes_of_their_mount_and_of_the_driver() {
    let Some(mut rig) = DriverRig::new() else { return };
    let mut log = LockedLog::open(&rig, &[]);
    write_beside_ends(&mut rig, &mut log);
    assert_eq!(std::fs::read_to_string(rig.path("src/log")).unwrap(), log.written);
    drop(log);
    end_volume(&rig);
}

#[test]
fn writers_of_a_bucket_outlive_the_processes_of_their_mount_and_of_the_driver() {
    let Some(mut rig) = DriverRig::new() else { return };
    let server = S3Server::in_memory().unwrap();
    let attributes = stage_bucket(&rig, &server);
    let mut log = LockedLog::open_in(&rig, &attributes);
    write_beside_ends(&mut rig, &mut log);
    assert_eq!(server.bytes("bucket", "p/log").unwrap(), log.written.as_bytes());
    drop(log);
    end_volume(&rig);
    assert_eq!(server.open_uploads(), 0);
}

/// Waits until the keeper has connected to the restarted driver, which then holds the mount's connection to the kernel.
fn wait_for_store(rig: &DriverRig) {
    wait_for("the driver holds the mount", || holds_fuse_connection(rig.pid()));
}

fn holds_fuse_connection(pid: u32) -> bool {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let is_connection = |path: &Path| std::fs::read_link(path).is_ok_and(|target| target == Path::new("/dev/fuse"));
    files.flatten().any(|file| is_connection(&file.path()))
}

/// Runs a script with root's rights.
fn sh(script: &str) -> std::process::Output {
    std::process::Command::new("sh").args(["-ec", script]).output().unwrap()
}

/// A container has a copy of the volume's mount, and gets each mount that is made on that one: with `HostToContainer` it is a slave
/// of it. So every further mount has to be made over the dead one, and over no other pod's.
#[test]
fn containers_of_a_volume_get_each_replacement() {
    use pb::volume_capability::access_mode::Mode;
    let Some(rig) = DriverRig::new() else { return };
    let mut attributes = rig.attributes();
    attributes.insert("mountOptions".into(), "cache-size=0,metrics=none,rw,norecover".into());
    let many = || capability_of(Mode::MultiNodeMultiWriter);
    // As kubelet's directory and that of the driver are on most hosts.
    let shared = ["pods", "state"].map(|name| rig.path(name).display().to_string());
    for dir in &shared {
        let out = sh(&format!("mkdir -p {dir}; mount --bind {dir} {dir}; mount --make-shared {dir}"));
        assert!(out.status.success(), "{out:?}");
    }
    rig.stage_as("pv", &attributes, many()).unwrap();
    rig.publish_as("pv", "writer", &attributes, many(), false).unwrap();
    rig.publish_as("pv", "reader", &attributes, many(), true).unwrap();
    let volume = rig.path("container").display().to_string();
    let start_container = |pod: &str| {
        let script = format!(
            "mkdir -p {volume}; mount --rbind {target} {volume}; mount --make-rslave {volume}; echo started; exec sleep 600",
            target = rig.target(pod).display()
        );
        let mut command = std::process::Command::new("unshare");
        command.args(["--mount", "--propagation", "unchanged", "sh", "-ec", &script]);
        let mut container = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = [0; 8];
        std::io::Read::read_exact(container.stdout.as_mut().unwrap(), &mut line).unwrap();
        container
    };
    let in_container = |id: u32, script: &str| sh(&format!("nsenter -t {id} -m sh -ec 'cd {volume}; {script}'"));
    let mut containers = ["writer", "reader"].map(|pod| vec![start_container(pod)]);
    for _ in 0..3 {
        rig.signal(rig.processes()[0], rustix::process::Signal::KILL);
        wait_for("the replaced mounts", || rig.read("writer").is_ok() && rig.read("reader").is_ok());
        for (pod, containers) in ["writer", "reader"].into_iter().zip(&mut containers) {
            // Another container of the pod is started between two ends.
            containers.push(start_container(pod));
            for container in containers {
                let id = container.id();
                wait_for("the container's mount", || in_container(id, "cat file").stdout == b"hello from the source");
                assert_eq!(in_container(id, "echo x >written").status.success(), pod == "writer");
            }
        }
    }
    // The end of one pod takes nothing from the other.
    rig.unpublish("pv", "writer").unwrap();
    assert!(rig.read("reader").is_ok());
    for container in &containers[1] {
        assert_eq!(in_container(container.id(), "cat file").stdout, b"hello from the source");
    }
    for container in containers.iter_mut().flatten() {
        container.kill().unwrap();
        container.wait().unwrap();
    }
    rig.unpublish("pv", "reader").unwrap();
    rig.unstage("pv").unwrap();
    for dir in shared {
        assert!(sh(&format!("umount {dir}")).status.success());
    }
    rig.check_empty();
}

#[test]
fn a_hung_mount_is_reported_and_does_not_hang_its_end() {
    let Some(rig) = DriverRig::new() else { return };
    let attributes = rig.attributes();
    rig.stage("pv", &attributes).unwrap();
    rig.publish("pv", "a", &attributes).unwrap();
    rig.signal(rig.servers()[0], rustix::process::Signal::STOP);
    let condition = rig.condition("pv", "a").unwrap();
    assert!(condition.abnormal && condition.message.contains("no answer within"), "{condition:?}");
    rig.unpublish("pv", "a").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}
