//! Writable exports: programs of clients change files by NFSv3 and NFSv4.2, over TCP and over RDMA, and find what they
//! wrote in the source. Clients go on after the mount was started again, and after a node was killed.

use spurline_rig::nfs_rig::{BIN, CASES, NfsRig, output, sh, start};
use spurline_testkit::{ACCESS_KEY, S3Server, SECRET_KEY};

/// What the classic suites of NFS clients try: names, attributes, sizes, exclusive creation, open files that lose their
/// names, locks between clients. In a folder of its own; `$mnt` is the mount itself, `$src` its source.
const CASES_OF_CLIENTS: &str = "
mkdir d d/sub; rmdir d/sub
echo one >d/a; ln d/a d/hard; ln -s a d/soft; mkfifo d/pipe; mkdir -p d/1/2/3
test $(readlink d/soft) = a; test -p d/pipe; rm d/pipe; rm -r d/1
mv d/a d/b; test $(cat d/hard) = one; test ! -e d/a
chmod 640 d/b; chown 1234:77 d/b; touch -d @1000000000 d/b
test \"$(stat -c '%a %u %g %Y %h' d/hard)\" = '640 1234 77 1000000000 2'
printf two >>d/b; test $(stat -c %s d/b) = 7; truncate -s 3 d/b; test $(cat d/b) = one
(set -C; echo x >d/exclusive); if (set -C; echo y >d/exclusive) 2>/dev/null; then exit 1; fi; test $(cat d/exclusive) = x
truncate -s 5M d/holes; printf end >>d/holes; printf mid | dd of=d/holes bs=1 seek=3000000 conv=notrunc status=none
test $(stat -c %s d/holes) = 5242883; cmp d/holes $src/d/holes
# A file that is open loses its name, gets another mode, is renamed over.
echo kept >d/open; exec 5<>d/open; rm d/open; test ! -e d/open; test \"$(cat <&5)\" = kept
printf more >&5; exec 5>&-; test -z \"$(find d -name '.nfs*')\"
echo old >d/target; exec 5<d/target; chmod 0 d/target; echo new >d/fresh; mv d/fresh d/target
test \"$(cat <&5)\" = old; exec 5<&-; test $(cat d/target) = new
# The server opens files again by their handles alone.
echo handle >d/handle; exec 5<>d/handle; mv $mnt/d $mnt/moved; echo 3 >/proc/sys/vm/drop_caches
printf HAN >&5; exec 5>&-; test $(cat $src/moved/handle) = HANdle; mv $mnt/moved $mnt/d
";

/// As a user: what a file's owner and group may do. git writes files that only their owner may read.
const CASES_OF_USERS: &str = "
export HOME=$PWD
git clone -q --no-hardlinks $repository clone; cd clone; git -c core.fsyncObjectFiles=true fsck
echo 'int main(void) { return 0; }' >new.c; printf 'all: new\\n\\t./new\\n' >Makefile; make -s CFLAGS=-O0
git add new.c; git -c user.name=x -c user.email=x commit -qm new; git status --porcelain | grep -q Makefile
umask 377; echo secret >readonly; umask 22; test $(cat readonly) = secret; if echo more 2>/dev/null >>readonly; then exit 1; fi
# By a further group.
echo of-group >>../../shared/file; echo new >../../shared/new; test $(stat -c '%u %g' ../../shared/new | tr ' ' -) = 1234-77
if echo x 2>/dev/null >../../others/file; then exit 1; fi
";

#[test]
#[ignore = "needs the virtual machine"]
fn guest_programs_of_clients_write_over_every_transport() {
    let rig = NfsRig::new("writes");
    let log = format!("{}/access", rig.dir());
    rig.mount(&["-o", "allow_other", "--rw", "--access-log", &log]);
    output(&["export", &rig.at(), "--rdma", "--rw", "--no-root-squash", "--clients", "10.77.0.0/16", "--apply"]);
    sh(&format!(
        "cd {}; git init -q repository; cd repository; for n in 1 2 3; do seq $n 3000 >file$n; done; git add .
        git -c user.name=x -c user.email=x commit -qm first; chown -R 1234:1234 .",
        rig.dir()
    ));
    for cases in CASES {
        for (name, options) in cases {
            rig.client_mount(name, &options.replace(",nolock", ""));
            println!("{name}");
            let dir = rig.dir();
            let place = format!(
                "src={dir}/src/{name} mnt={dir}/mnt/{name} repository={dir}/repository; export repository
                cd {dir}/{name}/{name}"
            );
            sh(&format!("mkdir {dir}/{name}/{name}; {place}; {CASES_OF_CLIENTS}"));
            // Each version and each transport once; the nightly form runs all.
            if ["v4tcp", "v3rdma"].contains(&name) || std::env::var_os("SPURLINE_TEST_NFS_ALL").is_some() {
                sh(&format!(
                    "{place}
                    mkdir user shared others; chown 1234:1234 user; echo file >shared/file; echo file >others/file
                    chgrp 77 shared shared/file; chmod 2770 shared; chmod 660 shared/file
                    cd user
                    setpriv --reuid 1234 --regid 1234 --groups 77 bash -euxo pipefail -c {user}
                    cd ..
                    fio='fio --output=fio.log --name=v --filename=data --size=4M --bs=64k --rw=randwrite --verify=crc32c'
                    $fio --do_verify=0 --end_fsync=1 --ioengine=psync
                    echo 3 >/proc/sys/vm/drop_caches
                    $fio --verify_only --ioengine=psync
                    cmp data $src/data
                    diff -r --no-dereference . $src",
                    user = quoted(CASES_OF_USERS),
                ));
            }
            // What a client has synced, the source has synced: the request reaches it.
            sh(&format!(
                "cd {dir}/{name}/{name}; before=$(grep -ci fsync {log} || true)
                dd if=/dev/zero of=synced bs=4k count=1 conv=fsync status=none
                for n in 1 2 3 4 5; do after=$(grep -ci fsync {log} || true); test $after = $before || break; sleep 1; done
                test $after -gt $before"
            ));
        }
        // A lock of NFSv4 is a lock in the source, which no other program there gets. The kernel refuses those of NFSv3.
        let [(one, _), (other, _)] = cases;
        sh(&format!(
            "cd {}; echo x >{one}/locked; exec 5<>{one}/locked; flock -n 5; grep OFDLCK /proc/locks; exec 5>&-
            timeout 150 flock -n {other}/locked true 2>error && exit 1; grep 'No locks available' error
            for name in {one} {other}; do
                for n in 1 2 3 4 5 6 7 8 9; do umount $name && break; sleep 1; done
            done",
            rig.dir()
        ));
    }
    output(&["export", &rig.at(), "--remove"]);
    rig.unmount();
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[test]
#[ignore = "needs the virtual machine"]
fn guest_clients_write_on_when_a_node_dies_and_the_mount_is_another() {
    let rig = NfsRig::new("group");
    let dir = rig.dir().to_owned();
    let node = |port: u16| {
        let words = format!("--group-port {port} --cache-dir {dir}/node-{port} --cache-size 32M --buffer-size 64M");
        let log = format!("{dir}/node-{port}.log");
        let node = start(&format!("exec {BIN} node --writable --source {dir}/src {words} --metrics none"), &log);
        sh(&format!("for n in $(seq 60); do grep -q 'over tcp' {log} && exit; sleep 1; done; cat {log}; exit 1"));
        node
    };
    let mut nodes = vec![node(7300), node(7301)];
    let words = format!(
        "{dir}/src {at} -d -o allow_other --rw --registry static:127.0.0.1:7300,127.0.0.1:7301 --buffer-size 64M \
         --log {dir}/log --metrics none",
        at = rig.at()
    );
    sh(&format!("{BIN} mount {words}"));
    output(&["export", &rig.at(), "--rdma", "--rw", "--no-root-squash", "--clients", "10.77.0.0/16", "--apply"]);
    let clients = [("v3tcp", "vers=3,proto=tcp,nolock"), ("v4rdma", "vers=4.2,proto=rdma,port=20049")];
    let mut writers = Vec::new();
    for (name, options) in clients {
        rig.client_mount(name, options);
        // One file is opened for each line, another one stays open; both are read back.
        let script = format!(
            "cd {dir}/{name}; mkdir {name}; cd {name}; exec 5>>open; n=0
            while [ ! -e {dir}/stop ]; do
                n=$((n+1)); echo line $n >>each; echo line $n >&5; sync open; echo $n >{dir}/{name}.next; mv {dir}/{name}.next {dir}/{name}.done
                test \"$(tail -n 1 each)\" = \"line $n\"; test \"$(tail -n 1 open)\" = \"line $n\"
            done
            exec 5>&-; echo ended >{dir}/{name}.end"
        );
        writers.push(start(&script, &format!("{dir}/{name}.writer")));
    }
    let progress = "progress() {
        for name in v3tcp v4rdma; do
            from=$(cat $name.done 2>/dev/null || echo 0)
            for n in $(seq 150); do [ $(cat $name.done 2>/dev/null || echo 0) -le $((from+2)) ] || break; sleep 1; done
            [ $(cat $name.done) -gt $((from+2)) ] || { tail -n 5 $name.writer log; exit 1; }
        done
    }";
    sh(&format!("cd {dir}; {progress}; progress"));
    drop(nodes.remove(0));
    sh(&format!("cd {dir}; {progress}; progress; progress"));
    nodes.push(node(7300));
    sh(&format!(
        "cd {dir}; {progress}
        rpc.nfsd 0; for n in $(seq 60); do {BIN} umount mnt && break; sleep 1; done
        {BIN} mount {words}
        # How long new opens wait for clients that had files open; it can be set while the server is stopped.
        echo 10 >/proc/fs/nfsd/nfsv4leasetime; echo 10 >/proc/fs/nfsd/nfsv4gracetime
        rpc.nfsd 8; progress
        touch stop
        for name in v3tcp v4rdma; do
            for n in $(seq 100); do [ ! -e $name.end ] || break; sleep 1; done
            cat $name.writer; test -e $name.end
            for file in each open; do seq -f 'line %.0f' $(cat $name.done) | cmp - src/$name/$file; done
            for n in 1 2 3 4 5 6 7 8 9; do umount $name && break; sleep 1; done
        done"
    ));
    drop(writers);
    output(&["export", &rig.at(), "--remove"]);
    rig.unmount();
}

/// What clients do in a folder of a bucket of their own; `$copies` is a folder beside the bucket.
const CASES_OF_A_BUCKET: &str = "
head -c 9000003 /dev/urandom >large; echo small >small; : >empty; mkdir folder folder/sub; ln -s small link
cp large moved; mv moved folder/sub/moved; printf more >>small; test \"$(cat link)\" = \"$(printf 'small\\nmore')\"
printf changed | dd of=large bs=1 seek=5000000 conv=notrunc status=none; truncate -s 8700000 large
chmod 640 small; chown 1234:77 small; touch -d @1000000000 small
test \"$(stat -c '%a %u %g %Y' small)\" = '640 1234 77 1000000000'
mv folder renamed; test \"$(find . -type f | sort | tr '\\n' ' ')\" = './empty ./large ./renamed/sub/moved ./small '
echo gone >gone; rm gone; mkdir none; rmdir none
# A file that is open gets another name, and loses its name.
echo kept >open; exec 5<open; mv open other; test $(cat other) = kept; rm other; test \"$(cat <&5)\" = kept; exec 5<&-
cp large small renamed/sub/moved $copies/; sync large small
echo 3 >/proc/sys/vm/drop_caches; cmp large $copies/large; cmp renamed/sub/moved $copies/moved
";

/// An object is whole in the bucket when the client's close or sync has returned.
#[test]
#[ignore = "needs the virtual machine"]
fn guest_clients_write_a_bucket() {
    let rig = NfsRig::new("bucket");
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    let dir = rig.dir();
    sh(&format!(
        "AWS_ACCESS_KEY_ID={ACCESS_KEY} AWS_SECRET_ACCESS_KEY={SECRET_KEY} {BIN} mount s3://bucket/p {at} -d {flags} --rw \
         --object-attrs -o allow_other --endpoint-url {endpoint}",
        at = rig.at(),
        flags = rig.flags(),
        endpoint = server.endpoint()
    ));
    output(&["export", &rig.at(), "--rw", "--no-root-squash", "--clients", "10.77.0.0/16", "--apply"]);
    for (name, options) in CASES[0] {
        rig.client_mount(name, options);
        sh(&format!(
            "mkdir {dir}/copies-{name} {dir}/{name}/{name}; copies={dir}/copies-{name}; cd {dir}/{name}/{name}
            {CASES_OF_A_BUCKET}"
        ));
        for (key, copy) in [("large", "large"), ("small", "small"), ("renamed/sub/moved", "moved")] {
            let written = std::fs::read(format!("{dir}/copies-{name}/{copy}")).unwrap();
            assert!(server.bytes("bucket", &format!("p/{name}/{key}")).unwrap() == written, "{name}: {key}");
        }
    }
    // What the one client has closed, the other one opens.
    let [(one, _), (other, _)] = CASES[0];
    sh(&format!(
        "echo by {one} >{dir}/{one}/shared; sleep 2; grep 'by {one}' {dir}/{other}/shared
        echo by {other} >{dir}/{other}/shared; sleep 2; grep 'by {other}' {dir}/{one}/shared
        for name in {one} {other}; do
            for n in 1 2 3 4 5 6 7 8 9; do umount {dir}/$name && break; sleep 1; done
        done"
    ));
    output(&["export", &rig.at(), "--remove"]);
    rig.unmount();
    assert_eq!(server.open_uploads(), 0);
}
