//! S3 clients of others: boto3, the AWS command line, rclone, s3fs, obstore, Mountpoint's library and s3fs-fuse read and write objects
//! with keys, which are files of a directory.

use crate::rig::*;
use spurline_rig::installed_tool::tool;
use spurline_rig::s3_clients::*;
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs;
use std::path::Path;

const KEY: &str = "client";
const SECRET: &str = "0123456789abcdef0123";

/// Calls of boto3: signatures in headers, in URLs and in bodies, parts, checksums, pages.
const BY_BOTO3: &str = r#"
import boto3, io, os, sys, urllib.request, urllib.error
from botocore.config import Config
from botocore.exceptions import ClientError
s3 = boto3.client('s3', config=Config(retries={'total_max_attempts': 1}, signature_version='s3v4'))
assert [b['Name'] for b in s3.list_buckets()['Buckets']] == ['data']
big = os.urandom(11 << 20)
s3.put_object(Bucket='data', Key='d/small', Body=b'small', Metadata={'note': 'kept'}, ContentType='text/x')
head = s3.head_object(Bucket='data', Key='d/small')
assert (head['Metadata'], head['ContentType']) == ({'note': 'kept'}, 'text/x'), head
s3.upload_fileobj(io.BytesIO(big), 'data', 'd/big')
assert s3.get_object(Bucket='data', Key='d/big')['Body'].read() == big
assert s3.get_object(Bucket='data', Key='d/big', Range='bytes=5-9')['Body'].read() == big[5:10]
for algorithm in ['CRC32', 'CRC32C', 'CRC64NVME', 'SHA1', 'SHA256']:
    try:
        s3.put_object(Bucket='data', Key='sums/' + algorithm, Body=big[:70000], ChecksumAlgorithm=algorithm)
    except Exception as error:
        # Some need a library of their own.
        assert '[crt]' in str(error), error
keys = [o['Key'] for p in s3.get_paginator('list_objects_v2').paginate(Bucket='data', PaginationConfig={'PageSize': 1}) for o in p.get('Contents', [])]
assert keys == sorted(keys) and {'d/big', 'd/small', 'sums/CRC32'} <= set(keys), keys
url = s3.generate_presigned_url('get_object', Params={'Bucket': 'data', 'Key': 'd/small'}, ExpiresIn=60)
assert urllib.request.urlopen(url).read() == b'small'
put = s3.generate_presigned_url('put_object', Params={'Bucket': 'data', 'Key': 'd/by url'}, ExpiresIn=60)
urllib.request.urlopen(urllib.request.Request(put, data=b'by url', method='PUT'))
assert s3.get_object(Bucket='data', Key='d/by url')['Body'].read() == b'by url'
for wrong in [url.replace('d/small', 'd/big'), url[:-1] + ('0' if url[-1] != '0' else '1')]:
    try:
        urllib.request.urlopen(wrong)
        sys.exit('a wrong signature was accepted: ' + wrong)
    except urllib.error.HTTPError as error:
        assert error.code == 403, error
s3.copy_object(Bucket='data', Key='d/copy', CopySource={'Bucket': 'data', 'Key': 'd/small'})
s3.copy({'Bucket': 'data', 'Key': 'd/big'}, 'data', 'd/big copy')
assert s3.get_object(Bucket='data', Key='d/big copy')['Body'].read() == big
try:
    s3.put_object(Bucket='data', Key='d/small', Body=b'x', IfNoneMatch='*')
    sys.exit('an object was replaced')
except ClientError as error:
    assert error.response['Error']['Code'] == 'PreconditionFailed', error
assert s3.get_object_tagging(Bucket='data', Key='d/small')['TagSet'] == []
try:
    s3.put_object_tagging(Bucket='data', Key='d/small', Tagging={'TagSet': [{'Key': 'k', 'Value': 'v'}]})
    sys.exit('there are no tags')
except ClientError as error:
    assert error.response['ResponseMetadata']['HTTPStatusCode'] == 501, error
def in_parts(parts, algorithm, **complete):
    of_upload = {'Bucket': 'data', 'Key': 'd/parts'}
    kind = 'COMPOSITE' if algorithm == 'SHA256' else 'FULL_OBJECT'
    of_upload['UploadId'] = s3.create_multipart_upload(ChecksumAlgorithm=algorithm, ChecksumType=kind, **of_upload)['UploadId']
    sums = []
    for number, part in enumerate(parts, 1):
        done = s3.upload_part(PartNumber=number, Body=part, ChecksumAlgorithm=algorithm, **of_upload)
        sums.append({'PartNumber': number, 'ETag': done['ETag'], 'Checksum' + algorithm: done['Checksum' + algorithm]})
    complete = {name: value(sums) for name, value in complete.items()}
    parts_named = complete.pop('Parts', sums)
    try:
        return s3.complete_multipart_upload(MultipartUpload={'Parts': parts_named}, **complete, **of_upload)
    except ClientError as error:
        s3.abort_multipart_upload(**of_upload)
        return error.response['Error']['Code']
import base64, hashlib, zlib
halves = [big[:6 << 20], big[6 << 20:]]
crc = lambda data: base64.b64encode(zlib.crc32(data).to_bytes(4, 'big')).decode()
sha = lambda data: hashlib.sha256(data).digest()
whole = base64.b64encode(sha(sha(halves[0]) + sha(halves[1]))).decode() + '-2'
assert in_parts(halves, 'CRC32', ChecksumCRC32=lambda _: crc(b'other')) == 'BadDigest'
assert in_parts(halves, 'SHA256', ChecksumSHA256=lambda _: whole[:-1] + '3') == 'BadDigest'
assert in_parts(halves, 'CRC32', MpuObjectSize=lambda _: 99) == 'InvalidRequest'
wrong_part = lambda sums: [sums[0], {**sums[1], 'ChecksumCRC32': sums[0]['ChecksumCRC32']}]
assert in_parts(halves, 'CRC32', Parts=wrong_part) == 'InvalidPart'
assert in_parts(halves, 'CRC32', ChecksumCRC32=lambda _: crc(big), MpuObjectSize=lambda _: len(big))['ChecksumCRC32'] == crc(big)
assert in_parts(halves, 'SHA256', ChecksumSHA256=lambda _: whole)['ChecksumSHA256'] == whole
assert s3.get_object(Bucket='data', Key='d/parts')['Body'].read() == big
ids = sorted(s3.create_multipart_upload(Bucket='data', Key='d/open')['UploadId'] for _ in range(3))
pages = s3.get_paginator('list_multipart_uploads').paginate(Bucket='data', PaginationConfig={'PageSize': 2})
assert [u['UploadId'] for p in pages for u in p['Uploads']] == ids
for upload in ids:
    s3.abort_multipart_upload(Bucket='data', Key='d/open', UploadId=upload)
s3.delete_objects(Bucket='data', Delete={'Objects': [{'Key': k} for k in ['d/parts', 'd/copy', 'd/big copy', 'd/by url']]})
for secret in ['0' * 20, '']:
    other = boto3.client('s3', aws_access_key_id='client', aws_secret_access_key=secret or '1' * 20)
    try:
        other.list_objects_v2(Bucket='data')
        sys.exit('a wrong secret was accepted')
    except ClientError as error:
        assert error.response['Error']['Code'] == 'SignatureDoesNotMatch', error
try:
    boto3.client('s3', aws_access_key_id='stranger', aws_secret_access_key='1' * 20).list_objects_v2(Bucket='data')
    sys.exit('a wrong key was accepted')
except ClientError as error:
    assert error.response['Error']['Code'] == 'InvalidAccessKeyId', error
"#;

/// Calls of s3fs and obstore.
const BY_LIBRARIES: &str = r#"
import os, s3fs, obstore
from obstore.store import S3Store
from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client
endpoint = os.environ['AWS_ENDPOINT_URL']
files = s3fs.S3FileSystem(endpoint_url=endpoint)
assert files.ls('data') == ['data/d', 'data/sums'], files.ls('data')
big = files.cat('data/d/big')
with files.open('data/by-s3fs/one', 'wb') as f:
    f.write(big)
assert files.cat_ranges(['data/d/big', 'data/by-s3fs/one'], [3, 7], [9, 11]) == [big[3:9], big[7:11]]
files.mv('data/by-s3fs/one', 'data/by-s3fs/two')
assert files.find('data/by-s3fs') == ['data/by-s3fs/two']
store = S3Store('data', endpoint=endpoint, client_options={'allow_http': True}, virtual_hosted_style_request=False)
obstore.put(store, 'by-obstore/one', big)
assert bytes(obstore.get(store, 'by-obstore/one').bytes()) == big
assert [bytes(r) for r in obstore.get_ranges(store, 'd/big', starts=[1, 100], ends=[5, 200])] == [big[1:5], big[100:200]]
assert [o['path'] for page in obstore.list(store, prefix='by-obstore') for o in page] == ['by-obstore/one']
obstore.copy(store, 'by-obstore/one', 'by-obstore/two')
obstore.delete(store, 'by-obstore/one')
files.rm('data/by-s3fs', recursive=True)
client = MountpointS3Client('us-east-1', endpoint=endpoint, force_path_style=True)
upload = client.put_object('data', 'by-mountpoint/big')
upload.write(big)
upload.close()
assert b''.join(client.get_object('data', 'by-mountpoint/big')) == big
assert b''.join(client.get_object('data', 'by-mountpoint/big', start=5, end=9 << 20)) == big[5:9 << 20]
assert client.head_object('data', 'by-mountpoint/big').size == len(big)
assert [o.key for page in client.list_objects('data', 'by-mountpoint/') for o in page.object_info] == ['by-mountpoint/big']
client.delete_object('data', 'by-mountpoint/big')
"#;

/// Calls of Arrow, polars and DuckDB.
const BY_DATA_LIBRARIES: &str = r#"
import duckdb, duckdb_extension_httpfs, glob, os, polars
import pyarrow, pyarrow.dataset as dataset, pyarrow.parquet as parquet
from pyarrow.fs import S3FileSystem, FileSelector
endpoint = os.environ['AWS_ENDPOINT_URL']
host = endpoint.split('//')[1]
key, secret = os.environ['AWS_ACCESS_KEY_ID'], os.environ['AWS_SECRET_ACCESS_KEY']
rows = 300_000
table = pyarrow.table({'number': list(range(rows)), 'name': [f'row {n % 1000}' for n in range(rows)]})
files = S3FileSystem(endpoint_override=host, scheme='http', access_key=key, secret_key=secret, region='us-east-1')
parquet.write_table(table, 'data/arrow/one.parquet', filesystem=files, row_group_size=50_000)
dataset.write_dataset(table.slice(0, 1000), 'data/arrow/set', filesystem=files, format='parquet', create_dir=False)
assert parquet.read_table('data/arrow/one.parquet', filesystem=files).equals(table)
found = dataset.dataset('data/arrow/one.parquet', filesystem=files).to_table(filter=dataset.field('number') > rows - 10)
assert found.num_rows == 9
assert sorted(info.base_name for info in files.get_file_info(FileSelector('data/arrow'))) == ['one.parquet', 'set']
options = {'aws_endpoint_url': endpoint, 'aws_allow_http': 'true', 'aws_access_key_id': key, 'aws_secret_access_key': secret, 'aws_region': 'us-east-1'}
counted = polars.scan_parquet('s3://data/arrow/one.parquet', storage_options=options).filter(polars.col('number') < 7).collect()
assert counted.height == 7
counted.write_parquet('s3://data/polars/few.parquet', storage_options=options)
assert polars.read_parquet('s3://data/polars/few.parquet', storage_options=options).equals(counted)
extension = glob.glob(os.path.dirname(duckdb_extension_httpfs.__file__) + '/extensions/*/httpfs.duckdb_extension')[0]
duck = duckdb.connect()
duck.execute(f"LOAD '{extension}'")
duck.execute(f"CREATE SECRET (TYPE s3, ENDPOINT '{host}', USE_SSL false, URL_STYLE 'path', KEY_ID '{key}', SECRET '{secret}', REGION 'us-east-1')")
assert duck.execute("SELECT sum(number) FROM 's3://data/arrow/*.parquet'").fetchone()[0] == rows * (rows - 1) // 2
duck.execute("COPY (SELECT * FROM 's3://data/arrow/one.parquet' WHERE number < 100000) TO 's3://data/duck/many.parquet'")
assert duck.execute("SELECT count(*) FROM 's3://data/duck/many.parquet'").fetchone()[0] == 100000
"#;

/// Programs on a mount of s3fs-fuse.
const BY_S3FS_FUSE: &str = r#"
set -euo pipefail
s3fs data "$MOUNT" -o "url=$AWS_ENDPOINT_URL,use_path_request_style,passwd_file=$KEYS"
trap 'umount "$MOUNT"' EXIT
cd "$MOUNT"
cmp d/before "$LOCAL/big"
mkdir new
cp "$LOCAL/big" new/big
cmp new/big "$LOCAL/big"
printf tail >> new/big
mv new/big 'new/with a space'
[ "$(tail -c 4 'new/with a space')" = tail ]
[ "$(ls new)" = 'with a space' ]
for n in $(seq 20); do echo "$n" > "new/$n"; done
[ "$(cat new/[0-9]* | sort -n | tail -1)" = 20 ]
rm new/[0-9]* d/before
cd /
"#;

/// Uploads of boto3 to an endpoint without keys, over TLS: the bodies are in chunks, with a checksum behind.
const BY_BOTO3_WITHOUT_KEYS: &str = r#"
import boto3, io, os
sent = []
s3 = boto3.client('s3', verify=os.environ['CERT'])
s3.meta.events.register('before-send.s3', lambda request, **_: sent.append(request.headers.get('Content-Encoding')))
big = os.urandom(9 << 20)
s3.put_object(Bucket='data', Key='small', Body=b'small')
s3.upload_fileobj(io.BytesIO(big), 'data', 'big')
assert b'aws-chunked' in sent, sent
assert s3.get_object(Bucket='data', Key='small')['Body'].read() == b'small'
assert s3.get_object(Bucket='data', Key='big')['Body'].read() == big
"#;

#[test]
fn clients_with_any_keys_write_where_the_endpoint_has_none() {
    let Some(bin) = s3_clients() else { return };
    let world = World::new();
    let data = world.dir("data");
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let cert = world.file("cert.pem", certified.cert.pem().as_bytes());
    let key = world.file("key.pem", certified.signing_key.serialize_pem().as_bytes());
    let words = ["--writable", "--s3-tls-cert", cert.to_str().unwrap(), "--s3-tls-key", key.to_str().unwrap()];
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &words);
    let url = format!("https://{}", at.address);
    let keys = || ClientKeys { id: "any", secret: "any" };
    succeed(s3_client(&bin.join("python"), &url, keys()).env("CERT", &cert).args(["-c", BY_BOTO3_WITHOUT_KEYS]));
    assert_eq!(fs::read(data.join("small")).unwrap(), b"small");
    let aws = || {
        let mut command = s3_client(&bin.join("aws"), &url, keys());
        command.env("AWS_CA_BUNDLE", &cert).args(["s3", "cp", "--quiet"]);
        command
    };
    succeed(aws().arg(data.join("big")).arg("s3://data/by-aws"));
    assert!(fs::read(data.join("by-aws")).unwrap() == fs::read(data.join("big")).unwrap());
    let local = world.path("local");
    succeed(aws().arg("s3://data/by-aws").arg(&local));
    assert!(fs::read(local).unwrap() == fs::read(data.join("big")).unwrap());
}

/// Arrow, polars and DuckDB; `SPURLINE_TEST_DATA_LIBRARIES=1` runs the test.
#[test]
fn data_libraries_read_and_write() {
    if std::env::var_os("SPURLINE_TEST_DATA_LIBRARIES").is_none() {
        return;
    }
    let Some(bin) = s3_data_libraries() else { return };
    let world = World::new();
    let data = world.dir("data");
    let at = Endpoint::gateway_with_keys(&world, data.to_str().unwrap(), &format!("{KEY}:{SECRET}\n"));
    let endpoint = at.url();
    let mut python = s3_client(&bin.join("python"), &endpoint, ClientKeys { id: KEY, secret: SECRET });
    succeed(python.args(["-c", BY_DATA_LIBRARIES]));
}

#[test]
fn clients_of_others_read_and_write() {
    let (Some(bin), Some(libraries)) = (s3_clients(), s3_libraries()) else { return };
    let world = World::new();
    let data = world.dir("data");
    let at = Endpoint::gateway_with_keys(&world, data.to_str().unwrap(), &format!("{KEY}:{SECRET}\n"));
    let endpoint = at.url();
    let client = |program: &str| s3_client(&bin.join(program), &endpoint, ClientKeys { id: KEY, secret: SECRET });
    succeed(client("python").args(["-c", BY_BOTO3]));
    let big = fs::read(data.join("d/big")).unwrap();
    assert_eq!(fs::read(data.join("d/small")).unwrap(), b"small");
    assert!(!data.join("d/copy").exists());

    let local = world.dir("local");
    succeed(client("aws").args(["s3", "cp", "--quiet", "s3://data/d/big"]).arg(local.join("big")));
    assert!(fs::read(local.join("big")).unwrap() == big);
    succeed(client("aws").args(["s3", "sync", "--quiet"]).arg(&local).arg("s3://data/by-aws"));
    assert!(fs::read(data.join("by-aws/big")).unwrap() == big);
    let listed = succeed(client("aws").args(["s3", "ls", "s3://data/"]));
    assert!(listed.contains("PRE by-aws/") && listed.contains("PRE d/"), "{listed}");
    succeed(client("aws").args(["s3", "rm", "--quiet", "--recursive", "s3://data/by-aws"]));
    assert!(!data.join("by-aws").exists());

    succeed(client("rclone").args(["copyto"]).arg(local.join("big")).arg("s:data/by-rclone/big"));
    succeed(client("rclone").args(["check", "--download"]).arg(&local).arg("s:data/by-rclone"));
    succeed(client("rclone").args(["purge", "s:data/by-rclone"]));
    assert!(!data.join("by-rclone").exists());

    let python = libraries.join("python");
    succeed(s3_client(&python, &endpoint, ClientKeys { id: KEY, secret: SECRET }).args(["-c", BY_LIBRARIES]));
    assert!(fs::read(data.join("by-obstore/two")).unwrap() == big);
    assert!(!data.join("by-s3fs").exists() && !data.join("by-obstore/one").exists());
}

#[test]
fn markers_of_a_bucket_are_removed_with_all_below() {
    let Some(bin) = s3_clients() else { return };
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("source");
    let at = Endpoint::gateway(&world, "s3://source", &["--writable", "--endpoint-url", &server.endpoint()]);
    for key in ["e1/", "e1/d/", "e1/d/x", "e1/empty/", "e10"] {
        at.put(&format!("/source/{key}"), b"").expect(200, "");
    }
    let mut aws = s3_client(&bin.join("aws"), &at.url(), ClientKeys { id: "any", secret: "any" });
    succeed(aws.args(["s3", "rm", "--quiet", "--recursive", "s3://source/e1/"]));
    assert_eq!(server.keys("source"), ["e10"]);
}

#[test]
fn s3fs_fuse_mounts_the_bucket() {
    let Some(_) = tool("s3fs") else { return };
    if !can_mount() {
        return;
    }
    let world = World::new();
    let data = world.dir("data");
    let local = world.dir("local");
    let big: Vec<u8> = (0..11 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(local.join("big"), &big).unwrap();
    fs::create_dir(data.join("d")).unwrap();
    fs::write(data.join("d/before"), &big).unwrap();
    let keys = format!("{KEY}:{SECRET}\n");
    let at = Endpoint::gateway_with_keys(&world, data.to_str().unwrap(), &keys);
    let mut programs = s3_client(Path::new("bash"), &at.url(), ClientKeys { id: KEY, secret: SECRET });
    programs.env("MOUNT", world.dir("mounted")).env("LOCAL", &local).env("KEYS", world.path("keys"));
    succeed(programs.args(["-c", BY_S3FS_FUSE]));
    let changed = fs::read(data.join("new/with a space")).unwrap();
    assert!(changed.strip_suffix(b"tail").is_some_and(|before| before == big));
    assert!(!data.join("d/before").exists());
}

#[test]
fn a_mount_writes_through_the_endpoint() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let data = world.dir("data");
    let at = Endpoint::gateway_with_keys(&world, data.to_str().unwrap(), &format!("{KEY}:{SECRET}\n"));
    let mut command = world.command(&["mount", "s3://data", "--rw"]);
    command.arg(world.dir("mnt")).arg("--cache-dir").arg(world.dir("mount-cache"));
    command.env("AWS_ENDPOINT_URL", at.url()).env("AWS_REGION", "us-east-1");
    command.env("AWS_ACCESS_KEY_ID", KEY).env("AWS_SECRET_ACCESS_KEY", SECRET);
    let mount = world.mount_with(&mut command);
    let big = bytes(3, 20 * MIB);
    fs::create_dir(mount.at.join("folder")).unwrap();
    fs::write(mount.at.join("folder/empty"), b"").unwrap();
    fs::write(mount.at.join("folder/big"), &big).unwrap();
    fs::write(mount.at.join("small"), b"small").unwrap();
    fs::rename(mount.at.join("small"), mount.at.join("folder/renamed")).unwrap();
    fs::create_dir(mount.at.join("gone")).unwrap();
    fs::remove_dir(mount.at.join("gone")).unwrap();
    assert!(fs::read(mount.at.join("folder/big")).unwrap() == big);
    mount.unmount();
    assert_eq!(fs::read(data.join("folder/empty")).unwrap(), b"");
    assert!(fs::read(data.join("folder/big")).unwrap() == big);
    assert_eq!(fs::read(data.join("folder/renamed")).unwrap(), b"small");
    assert!(!data.join("gone").exists() && !data.join("small").exists());
}
