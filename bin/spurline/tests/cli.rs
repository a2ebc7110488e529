//! The command line: usage errors, precedence, exit codes, generated files. Runs the binary as a black box.

use spurline_testkit::skip;
use std::process::{Command, Output};

/// The binary with no variable of the caller's that could steer it.
fn spurline() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spurline"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SPURLINE_") {
            command.env_remove(name);
        }
    }
    command.env_remove("RUST_LOG");
    command
}

fn run(words: &[&str]) -> Output {
    spurline().args(words).output().unwrap()
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// Asserts exit code `code` and a message that contains all of `says`.
fn refused(out: &Output, code: i32, says: &[&str]) {
    let text = stderr(out);
    assert_eq!(out.status.code(), Some(code), "{text}");
    for part in says {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
    assert!(!text.contains('\u{1b}'), "colour although this is no terminal: {text:?}");
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn wrong_words_exit_2_and_say_what_is_right() {
    let m = |more: &[&str]| {
        let mut words = vec!["mount", "/tmp", "/mnt/x"];
        words.extend(more);
        run(&words)
    };
    refused(&run(&[]), 2, &["Usage"]);
    refused(&run(&["monut"]), 2, &["monut", "mount"]);
    refused(&run(&["mount", "/tmp"]), 2, &["MOUNTPOINT"]);
    refused(&run(&["mount", "s4://b", "/mnt/x"]), 2, &["unknown scheme 's4'", "s3://BUCKET"]);
    refused(&run(&["node"]), 2, &["--source"]);
    // Before the path is looked at.
    refused(
        &run(&["export", "/mnt/x", "--apply"]),
        2,
        &["--apply needs --clients", "fix: name them, such as --clients "],
    );
    refused(&m(&["--cache-sise", "1G"]), 2, &["--cache-sise", "--cache-size"]);
    refused(&m(&["--cache-size", "1X"]), 2, &["--cache-size", "'1X' is not a size", "4MiB"]);
    refused(&m(&["--cache-size", "-2"]), 2, &["-1 means all"]);
    refused(&m(&["--attr-cache", "5 parsecs"]), 2, &["--attr-cache", "is not a duration", "250ms"]);
    refused(&m(&["--block-size", "3M"]), 2, &["power of two"]);
    refused(&m(&["--free-space-ratio", "1.5"]), 2, &["--free-space-ratio", "0 to 0.99"]);
    refused(&m(&["--max-write", "9000B"]), 2, &["--max-write", "multiple of 4K"]);
    // The kernel would hand out not one request.
    refused(&m(&["--max-write", "4K"]), 2, &["--max-write", "from 8K"]);
    refused(&m(&["-o", "allow_root"]), 2, &["-o allow_root", "allow_other"]);
    refused(&m(&["-o", "auto_unmount"]), 2, &["-o auto_unmount", "spurline umount"]);
    refused(&m(&["--buffer-size", "8M"]), 2, &["too small", "is needed", "--buffer-size"]);
    refused(&m(&["--buffer-size", "900T"]), 2, &["do not fit", "raise the limit"]);
    refused(&m(&["--registry", "consul://h:2379"]), 2, &["is no registry", "static:", "etcd:"]);
    refused(&m(&["--registry", "coordinator://a:1,b:1"]), 2, &["several coordinators", "coordinator://a:1", "etcd://"]);
    refused(&m(&["--registry", "static:h"]), 2, &["HOST:PORT"]);
    refused(&m(&["--transport", "carrier-pigeon"]), 2, &["possible values: auto, tcp, rdma"]);
    refused(&m(&["--origin-timeout", "0"]), 2, &["--origin-timeout", "would fail every request"]);
    refused(&m(&["--endpoint-url", "host:9000"]), 2, &["--endpoint-url", "http://"]);
    refused(&m(&["--metrics", "nowhere"]), 2, &["--metrics", "none"]);
    refused(&m(&["--nconnect", "65"]), 2, &["--nconnect"]);
    refused(&m(&["--group-network", "eth0::eth1"]), 2, &["--group-network", "empty"]);
    refused(&m(&["--transport", "rdma"]), 2, &["--transport rdma without --rdma-network", "ib0:ib1"]);
    refused(&m(&["--rdma-network", "ib0::ib1"]), 2, &["--rdma-network 'ib0::ib1'", "empty"]);
    refused(&m(&["--rdma-network", "10.0.0.1"]), 2, &["an address, not an interface", "net list"]);
    refused(&m(&["--rdma-network", "../x"]), 2, &["that is no interface"]);
    refused(&m(&["--rdma-network", "ib0", "--rdma-silence", "1ms"]), 2, &["--rdma-silence", "dead rail"]);
    refused(&m(&["--rdma-network", "ib0", "--rdma-retry", "0"]), 2, &["--rdma-retry"]);
    refused(&m(&["-o", "allow_othr"]), 2, &["allow_othr", "did you mean allow_other"]);
    refused(&m(&["-o", "rw", "--read-only"]), 2, &["not both"]);
    refused(&m(&["--cache-dir", "/nowhere/*"]), 2, &["matches no directory"]);
    refused(&m(&["-d", "-f"]), 2, &["cannot be used with"]);
    let weight = |n| run(&["node", "--source", "/tmp", "--weight", n]);
    refused(&weight("-1"), 2, &["--weight", "'-1' is not a weight", "from 0, which takes no blocks"]);
    refused(&weight("heavy"), 2, &["--weight", "'heavy' is not a weight"]);
    refused(&run(&["stats", "/mnt/x", "-c", "0"]), 2, &["--count 0 would show nothing", "1 or more"]);
}

/// What users of JuiceFS paste works, or one sentence says what does the same.
#[test]
fn words_of_other_systems_work_or_are_explained() {
    let m = |more: &[&str]| run(&[&["mount", "/tmp", "/mnt/x"][..], more].concat());
    refused(&m(&["--buffer-size=8192"]), 2, &["--buffer-size", "did you mean 8192M?", "no unit"]);
    refused(&m(&["--cache-size=102400"]), 2, &["--cache-size", "did you mean 102400M?", "no unit"]);
    let node = run(&["node", "--source", "/tmp", "--buffer-size=8192"]);
    refused(&node, 2, &["did you mean 8192M?"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    std::fs::write(&file, "buffer-size = 8192\n").unwrap();
    refused(&m(&["--config", file.to_str().unwrap()]), 2, &["key 'buffer-size'", "did you mean 8192M?"]);
    let mut variable = spurline();
    variable.args(["mount", "/tmp", "/mnt/x"]).env("SPURLINE_CACHE_SIZE", "102400");
    refused(&variable.output().unwrap(), 2, &["variable SPURLINE_CACHE_SIZE", "did you mean 102400M?"]);
    // Accepted: the wrong block size is found only after all words were parsed.
    let pasted = ["--use-iorpc", "--cache-try-dio", "--no-sharing", "--group-ip=127.0.0.1", "--block-size", "3M"];
    refused(&m(&pasted), 2, &["--block-size 3M"]);
    let node =
        ["node", "--source", "/tmp", "--use-iorpc", "--cache-try-dio", "--group-ip=127.0.0.1", "--block-size=3M"];
    refused(&run(&node), 2, &["--block-size 3M"]);
    // --group-ip is --group-network.
    let alias = ["node", "--source", "/tmp", "--cache-size", "0", "--metrics", "none", "--group-ip=192.0.2.77"];
    refused(&run(&alias), 2, &["--group-network '192.0.2.77'", "no address of this host matches"]);
    let mut variable = spurline();
    variable.args(&alias[..7]).env("SPURLINE_GROUP_IP", "192.0.2.77");
    refused(&variable.output().unwrap(), 2, &["--group-network '192.0.2.77'"]);
    for (flag, says) in [
        ("--group-weight=200", "--weight N of 'spurline node'"),
        ("--fill-group-cache", "spurline load PATH"),
        ("--attrcacheto=5", "--attr-cache TIME"),
        ("--verify-cache-checksum=full", "every block is verified"),
        ("--prefetch=3", "--max-readahead"),
        ("--writeback", "nothing is uploaded later"),
        ("--max-uploads=20", "parts of 8 MiB"),
        ("--rename-dir-limit=5", "--rename-limit N"),
        ("--acl=private", "the ACL that the bucket gives"),
        ("--sse-kms=key", "--sse aws:kms with --sse-kms-key-id"),
        ("--use-rrs", "--storage-class REDUCED_REDUNDANCY"),
        ("--allow-delete", "--rw allows removals"),
        ("--billing-project=p", "paid by the owner"),
        ("--upload-delay=1m", "nothing is uploaded later"),
        ("--token=x", "--group-token-file FILE"),
        ("--subdir=a", "s3://BUCKET/FOLDER"),
        ("--backup-meta=0", "no metadata engine"),
        ("--heartbeat=12", "--member-hold TIME"),
        ("--profile=research", "AWS_PROFILE=NAME"),
        ("--prefix=data/", "s3://BUCKET/FOLDER"),
        ("--metadata-ttl=60", "--attr-cache TIME"),
        ("--vfs-cache-mode=full", "blocks that are read are cached"),
        ("--vfs_cache_max_size=1G", "--cache-size SIZE"),
        ("--stat-cache-ttl=1m", "--attr-cache TIME"),
        ("--implicit-dirs", "a folder is shown"),
        ("--passwd_file=/etc/passwd-s3fs", "~/.aws/credentials"),
    ] {
        let name = flag.split('=').next().unwrap();
        refused(&m(&[flag]), 2, &[name, "a flag of another file system", says]);
    }
    for (words, says) in [
        (&["warmup", "/mnt/x"][..], "spurline load PATH"),
        (&["job", "load", "--path", "/x"], "spurline load PATH"),
        (&["fs", "ls", "/"], "spurline free PATH"),
        (&["doctor", "/mnt/x"], "spurline net doctor"),
        (&["format", "redis://x", "y"], "spurline mount SOURCE MOUNTPOINT"),
    ] {
        refused(&run(words), 2, &[words[0], "a command of another file system", says]);
    }
    refused(&run(&["load", "--path", "/x"]), 2, &["paths are words without a flag"]);
    // A mount option that was written as a flag, and the reverse.
    refused(&m(&["--allow-other"]), 2, &["--allow-other is a mount option", "-o allow_other"]);
    refused(&m(&["--allow_root"]), 2, &["--allow_root is a mount option", "-o allow_other"]);
    refused(&m(&["-o", "allow-other"]), 2, &["-o allow-other", "write allow_other"]);
    refused(&m(&["-o", "cache-size=0"]), 2, &["-o cache-size=0", "it is a flag: --cache-size=0"]);
    refused(&m(&["-o", "read-only"]), 2, &["it is a flag: --read-only"]);
    refused(&m(&["-o", "bg"]), 2, &["an option of another file system", "x-systemd.automount"]);
    refused(&m(&["-o", "zz"]), 2, &["rw, ro, allow_other", "relatime", "fsname=NAME", "_netdev"]);
    std::fs::write(&file, "vfs-cache-max-size = \"1G\"\n").unwrap();
    refused(&m(&["--config", file.to_str().unwrap()]), 2, &["unknown key 'vfs-cache-max-size'", "cache-size=SIZE"]);
    // A flag that another service has.
    refused(&m(&["--rdma-port=7001"]), 2, &["--rdma-port is a flag of 'spurline node'"]);
    for flag in ["--anonymous", "--no-sign-request"] {
        let says = format!("{flag} is a flag of 'spurline mount', 'spurline gateway' and 'spurline node'");
        refused(&run(&["load", flag, "/x"]), 2, &[&says, "spurline mount --help"]);
    }
    // splice looks at the kernel's limit of pipes.
    let limit = std::fs::read_to_string("/proc/sys/fs/pipe-max-size").unwrap();
    let words = ["--iorpc-mode=splice", "--rdma-network", "no-such0", "--cache-dir", dir.path().to_str().unwrap()];
    let splice = run(&[&["node", "--source", "/tmp", "--metrics", "none"][..], &words].concat());
    let small = limit.trim().parse::<u64>().unwrap() < 8 << 20;
    let says = format!("fs.pipe-max-size is {}", limit.trim());
    assert_eq!(stderr(&splice).contains(&says), small, "{}", stderr(&splice));
}

#[test]
fn what_is_missing_exits_3() {
    let dir = tempfile::tempdir().unwrap();
    let (mountpoint, cache) = (dir.path().join("m"), dir.path().join("c"));
    std::fs::create_dir_all(&mountpoint).unwrap();
    let says = ["--rdma-network no-such0", "no interface of that name", "fix"];
    // Also a mount that needs no network: a named interface has to exist.
    let mount = ["mount", "/tmp", mountpoint.to_str().unwrap(), "--cache-size", "0", "--metrics", "none"];
    let network = ["--rdma-network", "no-such0"];
    refused(&run(&[&mount[..], &network].concat()), 3, &says);
    // Warnings before a refusal are printed all the same: a consumer ignores one of these flags.
    let consumer = ["--registry", "static:127.0.0.1:1", "--block-size", "1M"];
    let others = ["--free-space-ratio", "0.2", "--disk-timeout", "9s", "--max-downloads", "7"];
    let consumer = [&consumer[..], &others].concat();
    let unused = [
        "--block-size 1M",
        "is not used: with --registry the nodes decide the block size",
        "--free-space-ratio, --disk-timeout are not used: with --registry the nodes hold the cache",
        "--max-downloads is not used: with --registry the nodes read the source",
    ];
    refused(&run(&[&mount[..], &network, &consumer].concat()), 3, &unused);
    let node = ["node", "--source", "/tmp", "--cache-dir", cache.to_str().unwrap(), "--metrics", "none"];
    refused(&run(&[&node[..], &network, &["--transport", "rdma"]].concat()), 3, &says);
    // Loopback is there and no rail.
    refused(&run(&[&node[..], &["--rdma-network", "lo"]].concat()), 3, &["--rdma-network lo", "no RDMA device"]);
}

/// One rule for everything that is named and does not exist.
#[test]
fn what_is_named_and_not_there_exits_3() {
    let dir = tempfile::tempdir().unwrap();
    let (mountpoint, missing) = (dir.path().join("m"), dir.path().join("missing/x"));
    std::fs::create_dir_all(&mountpoint).unwrap();
    let missing = missing.to_str().unwrap();
    let mount = |more: &[&str]| {
        let words = ["mount", "/tmp", mountpoint.to_str().unwrap(), "--cache-size", "0", "--metrics", "none"];
        run(&[&words[..], more].concat())
    };
    refused(&mount(&["--config", missing]), 3, &[missing, "fix"]);
    refused(&mount(&["--log", missing]), 3, &[missing]);
    refused(&mount(&["--registry", "static:127.0.0.1:1", "--group-token-file", missing]), 3, &[missing]);
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    refused(&run(&["stats", &silent]), 3, &[&silent]);
    assert_eq!(run(&["status", &silent]).status.code(), Some(3));
    // An unreachable registry is reported at once, and not taken for a group without nodes.
    let registry = format!("coordinator://{silent}");
    let status = run(&["status", "--registry", &registry]);
    refused(&status, 3, &[&silent, "can't be reached", "start the registry"]);
    assert!(!stderr(&status).contains("--cache-group right"), "{}", stderr(&status));
    // And a directory that was misspelt is not made.
    let coordinator = run(&["coordinator", "--metrics", "none", "--state-file", missing]);
    refused(&coordinator, 3, &["--state-file", "there is no directory", "mkdir -p"]);
    assert!(!dir.path().join("missing").exists());
}

#[test]
fn commands_about_a_group_take_its_name_from_one_environment() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let with = |words: &[&str]| {
        let mut command = spurline();
        let registry = format!("coordinator://{silent}");
        command.args(words).env("SPURLINE_REGISTRY", registry).env("SPURLINE_CACHE_GROUP", "train");
        command.env("SPURLINE_GROUP_TOKEN_FILE", "/nowhere/token").output().unwrap()
    };
    let all = [
        &["status"][..],
        &["load", "s3://b/x", "--source", "s3://b"],
        &["free", "s3://b/x", "--source", "s3://b"],
        &["pin", "s3://b/x"],
        &["unpin", "s3://b/x"],
        &["limit", "s3://b/x", "--ttl", "1d"],
        &["rules"],
        &["node", "drain", "n1"],
    ];
    for words in all {
        refused(&with(words), 3, &["/nowhere/token"]);
        let help = String::from_utf8(with(&[words, &["--help"]].concat()).stdout).unwrap();
        for variable in ["SPURLINE_REGISTRY", "SPURLINE_CACHE_GROUP", "SPURLINE_GROUP_TOKEN_FILE"] {
            assert!(help.contains(variable), "{words:?}: {variable} is missing in: {help}");
        }
    }
    // A path has precedence over a variable, and two flags with different places are refused.
    refused(&with(&["load", "/proc"]), 1, &["not in a mount"]);
    refused(&with(&["load", "/proc", "--cache-group", "g"]), 2, &["the source of these files", "--source"]);
    let out = with(&["status", "/nowhere/at/all"]);
    assert_eq!(out.status.code(), Some(3), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("/nowhere/at/all"), "{out:?}");
    refused(&run(&["status", "--registry", "static:h:1", "/x"]), 2, &["/x and --registry"]);
}

#[test]
fn a_job_without_a_place_says_which_words_are_missing() {
    let names = ["--registry", "SPURLINE_REGISTRY", "--source"];
    refused(&run(&["load", "s3://b/x"]), 2, &[&["s3://b/x is a URL"], &names[..]].concat());
    refused(&run(&["free", "s3://b/x"]), 2, &[&["would free it"], &names[..]].concat());
    refused(&run(&["load", "x", "--source", "s3://b"]), 2, &names);
    refused(&run(&["load", "x", "--cache-group", "g"]), 2, &names);
    refused(&run(&["load", "x", "--registry", "coordinator://h:1"]), 2, &["the source of these files", "--source"]);
    refused(&run(&["load"]), 2, &["nothing to load", "--files-from FILE", "--source URL"]);
    // A source without a path is all of it: the coordinator is called.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let registry = format!("coordinator://{silent}");
    for action in ["load", "free"] {
        refused(&run(&[action, "--source", "s3://b", "--registry", &registry]), 3, &[&silent.to_string()]);
    }
    let etcd = ["load", "s3://b/x", "--source", "s3://b", "--registry", "etcd://h:1"];
    refused(&run(&etcd), 2, &["runs no jobs", "coordinator://"]);
}

/// `status` without the right to query a service reports that, and not that all is well.
#[test]
fn status_that_may_not_ask_exits_3() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    if !rustix::process::geteuid().is_root() {
        return skip("other-user", "another user can't be played");
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let socket = dir.path().join("node-127.0.0.1_1.sock");
    let _node = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let ask = |more: &[&str]| {
        let mut command = spurline();
        command.arg("status").args(more).env("SPURLINE_RUNTIME_DIR", dir.path()).uid(65534).gid(65534).output()
    };
    let out = match ask(&[]) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return skip("other-user", "another user may not run what was built here");
        }
        out => out.unwrap(),
    };
    let says = |out: &Output| String::from_utf8_lossy(&out.stdout).into_owned();
    assert_eq!(out.status.code(), Some(3), "{out:?}");
    assert!(says(&out).contains("unknown") && says(&out).contains("as root"), "{out:?}");
    let out = ask(&[socket.to_str().unwrap()]).unwrap();
    assert_eq!(out.status.code(), Some(3), "{out:?}");
    assert!(says(&out).contains("Permission denied") && says(&out).contains("as root"), "{out:?}");
}

#[test]
fn a_start_that_fails_leaves_no_directory_behind() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    // Neither root's nor another user's own default directories: one that is named is made in the same way.
    let cache = dir.path().join("cache");
    let words = ["node", "--source", "/tmp", "--metrics", "none", "--cache-dir", cache.to_str().unwrap()];
    let node = run(&[&words[..], &["--group-port", &port]].concat());
    refused(&node, 3, &[&port]);
    assert!(!cache.exists(), "the port was taken after the cache was opened");
    let mut kept = std::fs::create_dir(&cache).map(|()| run(&[&words[..], &["--group-port", &port]].concat())).unwrap();
    kept.stdout.clear();
    refused(&kept, 3, &[&port]);
    assert!(cache.exists(), "what was there before stays");
}

#[test]
fn help_and_version_are_no_errors() {
    for words in [&["--help"][..], &["-h"], &["--version"], &["mount", "-h"], &["mount", "--help"], &["help", "node"]] {
        let out = run(words);
        assert_eq!(out.status.code(), Some(0), "{words:?}: {}", stderr(&out));
        assert!(!out.stdout.is_empty() && out.stderr.is_empty());
    }
    let long = String::from_utf8(run(&["mount", "--help"]).stdout).unwrap();
    let short = String::from_utf8(run(&["mount", "-h"]).stdout).unwrap();
    for part in ["Examples:", "Cache:", "Origin:", "Network:", "Logs and metrics:", "--no-sign-request"] {
        assert!(long.contains(part), "{part}");
    }
    assert!(!short.contains("Examples:") && short.len() < long.len());
    // Flags for compatibility work, and are in no help.
    for hidden in ["--use-iorpc", "--cache-try-dio", "--no-sharing", "--group-ip"] {
        assert!(!long.contains(hidden), "{hidden}");
    }
    let stats = String::from_utf8(run(&["stats", "--help"]).stdout).unwrap();
    for part in ["hit%   bytes from memory and disk, of all bytes, %", "lat    time of a request, mean in ms"] {
        assert!(stats.contains(part), "{part:?} is missing in: {stats}");
    }
}

/// Runs `node` with a config file that is refused after precedence is resolved, so that nothing starts.
#[test]
fn flag_over_variable_over_file_over_default() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    let path = file.to_str().unwrap();
    // Whichever block size holds is named by the refusal.
    let blame = |text: &str, env: Option<&str>, flag: Option<&str>, service: &str| {
        std::fs::write(&file, text).unwrap();
        let mut command = spurline();
        match service {
            "mount" => command.args(["mount", "/tmp", "/mnt/x", "--config", path]),
            _ => command.args(["node", "--source", "/tmp", "--config", path]),
        };
        if let Some(value) = env {
            command.env("SPURLINE_BLOCK_SIZE", value);
        }
        if let Some(value) = flag {
            command.args(["--block-size", value]);
        }
        let out = command.output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
        stderr(&out)
    };
    let top = "block-size = \"3M\"\n";
    assert!(blame(top, None, None, "mount").contains("--block-size 3M"));
    assert!(blame(top, Some("5M"), None, "mount").contains("--block-size 5M"));
    assert!(blame(top, Some("5M"), Some("7M"), "mount").contains("--block-size 7M"));
    let both = "block-size = \"3M\"\n[node]\nblock-size = \"6M\"\n";
    assert!(blame(both, None, None, "mount").contains("--block-size 3M"));
    assert!(blame(both, None, None, "node").contains("--block-size 6M"));
    // Numbers and lists are taken as such; a key of the other service does not disturb.
    let typed =
        "block-size = \"3000B\"\ncache-dir = [\"/a\", \"/b\"]\nweight = 7\nread-only = true\nmax-write = \"1M\"\n";
    assert!(blame(typed, None, None, "mount").contains("--block-size 3000B"));
    assert!(blame(typed, None, None, "node").contains("--block-size 3000B"));
}

#[test]
fn the_config_file_may_also_be_named_by_a_variable() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    std::fs::write(&file, "block-size = \"3M\"\n").unwrap();
    let out = spurline().args(["mount", "/tmp", "/mnt/x"]).env("SPURLINE_CONFIG", &file).output().unwrap();
    refused(&out, 2, &["--block-size 3M"]);
}

#[test]
fn a_source_may_come_from_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    std::fs::write(&file, "[node]\nsource = [\"/tmp\", \"/usr\"]\nblock-size = \"3M\"\n").unwrap();
    let out = spurline().args(["node", "--config"]).arg(&file).output().unwrap();
    refused(&out, 2, &["--block-size 3M"]);
}

#[test]
fn wrong_keys_name_file_key_and_the_nearest_known_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("spurline.toml");
    let with = |text: &str| {
        std::fs::write(&file, text).unwrap();
        spurline().args(["mount", "/tmp", "/mnt/x", "--config"]).arg(&file).output().unwrap()
    };
    refused(
        &with("cache_size = \"1G\""),
        2,
        &["spurline.toml", "unknown key 'cache_size'", "did you mean 'cache-size'"],
    );
    refused(&with("[mount]\nweight = 1"), 2, &["unknown key 'mount.weight'"]);
    refused(&with("[mout]\nmax-write = \"1M\""), 2, &["unknown key 'mout'", "'mount'"]);
    refused(&with("cache-size = \"1X\""), 2, &["spurline.toml", "key 'cache-size'", "is not a size"]);
    refused(&with("[node]\nweight = \"much\""), 2, &["key 'node.weight'", "much"]);
    refused(&with("read-only = \"perhaps\""), 2, &["key 'read-only'", "neither true nor false"]);
    refused(&with("transport = \"pigeon\""), 2, &["key 'transport'", "auto, tcp, rdma"]);
    refused(&with("block-size = [\"1M\", \"2M\"]"), 2, &["key 'block-size'", "one value"]);
    refused(&with("config = \"x\""), 2, &["unknown key 'config'"]);
    refused(&with("this is no toml"), 2, &["is not TOML"]);
    let out = run(&["mount", "/tmp", "/mnt/x", "--config", "/nowhere.toml"]);
    refused(&out, 3, &["/nowhere.toml", "No such file"]);
}

#[test]
fn wrong_variables_are_named() {
    let with =
        |name: &str, value: &str| spurline().args(["mount", "/tmp", "/mnt/x"]).env(name, value).output().unwrap();
    refused(&with("SPURLINE_CACHE_SIZE", "1X"), 2, &["environment variable SPURLINE_CACHE_SIZE", "is not a size"]);
    refused(&with("SPURLINE_TRANSPORT", "pigeon"), 2, &["environment variable SPURLINE_TRANSPORT", "auto, tcp, rdma"]);
    // The flag beats the variable, and is named.
    let words = ["mount", "/tmp", "/mnt/x", "--cache-size=1X"];
    let out = spurline().args(words).env("SPURLINE_CACHE_SIZE", "1X").output().unwrap();
    refused(&out, 2, &["--cache-size", "is not a size"]);
    assert!(!stderr(&out).contains("SPURLINE_CACHE_SIZE"), "{}", stderr(&out));
    // A variable of another system is honoured, unless there is our own.
    let retry = |ours: Option<&str>| {
        let mut command = spurline();
        command.args(["mount", "/tmp", "/mnt/x"]).env("IORPC_RDMA_RETRY_DURATION", "often");
        ours.map(|ours| command.env("SPURLINE_RDMA_RETRY", ours));
        command.output().unwrap()
    };
    refused(&retry(None), 2, &["environment variable IORPC_RDMA_RETRY_DURATION", "is not a duration"]);
    refused(&retry(Some("seldom")), 2, &["environment variable SPURLINE_RDMA_RETRY", "'seldom'"]);
    let mut command = spurline();
    command.args(["mount", "/tmp", "/mnt/x", "--rdma-network", "ib0"]).env("IORPC_RDMA_RETRY_DURATION", "0s");
    refused(&command.output().unwrap(), 2, &["--rdma-retry 0"]);
    // The variable of --log is SPURLINE_LOG, and its earlier name is accepted. A level is no file.
    refused(
        &with("SPURLINE_LOG", "debug"),
        2,
        &["environment variable SPURLINE_LOG", "a level and not a file", "SPURLINE_LOG_FILTER=debug"],
    );
    refused(
        &with("SPURLINE_LOG_FILE", "info"),
        2,
        &["environment variable SPURLINE_LOG_FILE", "SPURLINE_LOG_FILTER=info"],
    );
    // In the background too, the remedy is about the filter and not about the file.
    let log = tempfile::tempdir().unwrap();
    let mut command = spurline();
    command.args(["coordinator", "--state-file", "none", "--metrics", "none"]).env("SPURLINE_LOG_FILTER", "/a/b");
    let says = ["log filter '/a/b'", "--log-filter (SPURLINE_LOG_FILTER)"];
    refused(&command.output().unwrap(), 2, &says);
    command.arg("-d").env("SPURLINE_LOG", log.path().join("log"));
    refused(&command.output().unwrap(), 2, &says);
    // A flag beats a variable, wrong or not.
    let out = spurline()
        .args(["mount", "/tmp", "/mnt/x", "--cache-size", "1G", "--block-size", "3M"])
        .env("SPURLINE_CACHE_SIZE", "1X")
        .output()
        .unwrap();
    refused(&out, 2, &["--block-size 3M"]);
}

#[test]
fn unknown_variables_are_refused_like_flags() {
    let start = |name: &str, value: &str| {
        let mut command = spurline();
        command.args(["mount", "/nonexistent/source", "/nonexistent/mnt"]).env(name, value).output().unwrap()
    };
    refused(&start("SPURLINE_CASH_SIZE", "1G"), 2, &["unknown variable SPURLINE_CASH_SIZE", "SPURLINE_CACHE_SIZE?"]);
    refused(&start("SPURLINE_WHATEVER_ELSE", "1"), 2, &["unknown variable SPURLINE_WHATEVER_ELSE", "CONFIGURATION.md"]);
    // Names that the program itself, its earlier releases, Kubernetes and device plugins give.
    for (name, value) in [
        ("SPURLINE_LOG_FILE", "/nonexistent/log"),
        ("SPURLINE_ETCD_PASSWORD", "secret"),
        ("SPURLINE_COORDINATOR_SERVICE_HOST", "10.0.0.1"),
        ("SPURLINE_COORDINATOR_PORT", "tcp://10.0.0.1:7400"),
        ("SPURLINE_COORDINATOR_PORT_7400_TCP_ADDR", "10.0.0.1"),
        ("SPURLINE_HCAS_RDMA_IB", "mlx5_0"),
    ] {
        let out = start(name, value);
        assert!(!stderr(&out).contains("unknown variable"), "{name}: {}", stderr(&out));
    }
    // Commands without variables of flags do not look.
    let out = spurline().arg("--version").env("SPURLINE_CASH_SIZE", "1G").output().unwrap();
    assert!(out.status.success());
}

#[test]
fn completions_and_man_pages_are_made() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let out = run(&["completions", shell]);
        assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(text.contains("cache-size") && text.contains("umount"), "{shell}");
        assert!(!text.contains("use-iorpc"), "{shell}");
    }
    refused(&run(&["completions", "dos"]), 2, &["bash"]);
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(run(&["man", dir.path().to_str().unwrap()]).status.code(), Some(0));
    let page = std::fs::read_to_string(dir.path().join("spurline-mount.1")).unwrap();
    assert!(page.contains("cache\\-size") && page.contains(".SH"));
    assert!(page.contains(".SH SYNOPSIS\nspurline mount [OPTIONS] <SOURCE> <MOUNTPOINT>\n"), "{page}");
    refused(&run(&["man", "/nowhere/at/all"]), 1, &["/nowhere/at/all"]);
}

#[test]
fn the_reference_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../CONFIGURATION.md");
    let text = std::fs::read_to_string(path).unwrap();
    let printed = String::from_utf8(run(&["config-reference"]).stdout).unwrap();
    assert!(printed.contains("`--cache-size`") && printed.contains("SPURLINE_CACHE_SIZE"));
    assert!(
        text.ends_with(&printed),
        "CONFIGURATION.md is not what `spurline config-reference` prints; replace its end"
    );
}
