//! Hadoop's S3A, by which Spark reads and writes tables, at an endpoint of a directory and of a bucket.

use crate::rig::*;
use spurline_rig::installed_tool::tool;
use spurline_rig::python_packages::installed_packages;
use spurline_rig::s3_clients::*;
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs;
use std::path::Path;

/// Spark, with the libraries of this release of Hadoop; S3A and its SDK come from Maven Central.
const SPARK_PACKAGES: [&str; 1] = ["pyspark==4.3.0"];
const HADOOP_AWS: &str = "3.5.0";
/// The release of the SDK that S3A names.
const AWS_SDK: &str = "2.35.4";

/// What Spark says of libraries that it can't download.
const NO_LIBRARIES: [&str; 2] = ["unresolved dependency", "download failed"];

const KEY: &str = "client";
const SECRET: &str = "0123456789abcdef0123";

mod test_all {
    use super::*;

    /// Folders, renames, committers and Parquet. It needs Java 17 or newer, half a gigabyte for Spark, and minutes.
    #[test]
    fn hadoop_reads_and_writes_tables() {
        if tool("java").is_none() {
            return;
        }
        let Some(bin) = installed_packages("s3-hadoop", &SPARK_PACKAGES) else { return };
        let world = World::new();
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("source");
        let data = world.dir("data");
        let keys = key_file(&world, &format!("{KEY}:{SECRET}\n"));
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gateway/hadoop.py");
        let store = ["--writable", "--s3-keys", keys.to_str().unwrap(), "--endpoint-url", &server.endpoint()];
        for (bucket, source) in [("data", data.to_str().unwrap()), ("source", "s3://source")] {
            let at = Endpoint::gateway(&world, source, &store);
            let mut spark = s3_client(&bin.join("python"), &at.url(), ClientKeys { id: KEY, secret: SECRET });
            spark.env("BUCKET", bucket).env("JARS", bin.join("../jars")).env("TMPDIR", world.dir("spark"));
            let out = spark.env("HADOOP_AWS", HADOOP_AWS).env("AWS_SDK", AWS_SDK).arg(&script).output().unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            if NO_LIBRARIES.iter().any(|words| said.contains(words)) {
                skip("maven", "Hadoop's S3A can't be downloaded from Maven Central");
                return;
            }
            assert!(out.status.success(), "{said}");
            let counted = stats(&world.path("run"), at.address.as_ref());
            assert_eq!(count(&counted, "s3", "errors"), 0, "{counted}: {}", at.log());
        }
        assert_eq!(fs::read_dir(&data).unwrap().count(), 0, "all is removed");
        assert!(server.keys("source").is_empty(), "{:?}", server.keys("source"));
    }
}
