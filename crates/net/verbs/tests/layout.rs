//! Structures as this crate has them against the headers of rdma-core, where those are installed.

use std::fmt::Write as _;
use std::process::Command;

#[test]
fn structures_are_those_of_the_headers() {
    let (sizes, offsets) = (spurline_verbs::layout_sizes(), spurline_verbs::layout_offsets());
    let mut source = "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n#include <stddef.h>\n\
        #include <stdio.h>\nint main(void) {\n"
        .to_owned();
    for (name, _) in sizes {
        writeln!(source, "printf(\"%zu\\n\", sizeof(struct {name}));").unwrap();
    }
    for (name, field, _) in offsets {
        writeln!(source, "printf(\"%zu\\n\", offsetof(struct {name}, {field}));").unwrap();
    }
    source.push_str("return 0; }\n");
    let dir = tempdir();
    let (code, program) = (dir.join("layout.c"), dir.join("layout"));
    std::fs::write(&code, source).unwrap();
    let built = Command::new("cc").arg("-o").args([&program, &code]).output();
    let built = match built {
        Ok(out) if out.status.success() => true,
        Ok(out) => {
            let text = String::from_utf8_lossy(&out.stderr);
            assert!(text.contains("verbs.h: No such file") || text.contains("rdma_cma.h: No such file"), "{text}");
            false
        }
        Err(_) => false,
    };
    if !built {
        let _ = std::fs::remove_dir_all(&dir);
        spurline_testkit::skip("rdma", "the headers of rdma-core (libibverbs-dev, librdmacm-dev) are not installed");
        return;
    }
    let out = Command::new(&program).output().unwrap();
    let _ = std::fs::remove_dir_all(&dir);
    let mut theirs = std::str::from_utf8(&out.stdout).unwrap().lines().map(|n| n.parse::<usize>().unwrap());
    // What the libraries allocate may have grown at its end since.
    let grows =
        ["ibv_device", "ibv_context", "ibv_port_attr", "ibv_mr", "ibv_comp_channel", "rdma_cm_id", "rdma_cm_event"];
    for (name, ours) in sizes {
        let theirs = theirs.next().unwrap();
        assert!(*ours == theirs || (grows.contains(name) && theirs > *ours), "struct {name}: {ours}, header {theirs}");
    }
    for (name, field, ours) in offsets {
        assert_eq!(*ours, theirs.next().unwrap(), "struct {name}, field {field}");
    }
}

fn tempdir() -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("spurline-verbs-layout-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}
