"""Hadoop's S3A at an endpoint, by Spark: files, renames, both kinds of committers, and tables in Parquet."""
import os

from pyspark.sql import SparkSession

HADOOP = 'org.apache.hadoop:hadoop-aws:' + os.environ['HADOOP_AWS']
# The parts of the SDK that S3A uses. Its bundle of all services is fifty times as large.
SDK = ['s3', 's3-transfer-manager', 'sts', 'netty-nio-client', 'apache-client']
LEFT_OUT = ['software.amazon.awssdk:bundle', 'org.wildfly.openssl:wildfly-openssl']
bucket = os.environ['BUCKET']
options = {
    'jars.packages': ','.join([HADOOP] + [f'software.amazon.awssdk:{name}:{os.environ["AWS_SDK"]}' for name in SDK]),
    'jars.excludes': ','.join(LEFT_OUT),
    'jars.ivy': os.environ['JARS'],
    'ui.enabled': 'false',
    'driver.memory': '700m',
    'sql.shuffle.partitions': '2',
    'hadoop.fs.s3a.endpoint': os.environ['AWS_ENDPOINT_URL'],
    'hadoop.fs.s3a.endpoint.region': 'us-east-1',
    'hadoop.fs.s3a.path.style.access': 'true',
    'hadoop.fs.s3a.access.key': os.environ['AWS_ACCESS_KEY_ID'],
    'hadoop.fs.s3a.secret.key': os.environ['AWS_SECRET_ACCESS_KEY'],
    # An error is found and not repeated.
    'hadoop.fs.s3a.attempts.maximum': '1',
    'hadoop.fs.s3a.retry.limit': '1',
    # Files of the magic committer are uploads in parts, which the end of the job completes.
    'hadoop.fs.s3a.committer.name': 'magic',
    'hadoop.fs.s3a.buffer.dir': os.environ['TMPDIR'],
    'local.dir': os.environ['TMPDIR'],
}
builder = SparkSession.builder.master('local[2]')
for name, value in options.items():
    builder = builder.config('spark.' + name, value)
spark = builder.getOrCreate()
Path = spark._jvm.org.apache.hadoop.fs.Path
root = f's3a://{bucket}/hadoop'
files = Path(root).getFileSystem(spark._jsc.hadoopConfiguration())


def at(path):
    return Path(f'{root}/{path}' if path else root)


def names(path):
    return sorted(status.getPath().getName() for status in files.listStatus(at(path)))


# Folders, and files that move with them.
assert files.mkdirs(at('a/b'))
assert files.getFileStatus(at('a/b')).isDirectory() and names('a') == ['b'] and names('a/b') == []
for name in ['one', 'two']:
    out = files.create(at(f'a/b/{name}'))
    out.write(bytearray(name.encode() * 1000))
    out.close()
assert names('a/b') == ['one', 'two'], names('a/b')
assert files.rename(at('a/b'), at('a/c'))
assert names('a') == ['c'] and names('a/c') == ['one', 'two'] and not files.exists(at('a/b')), names('a')
assert files.rename(at('a/c/one'), at('a/c/three'))
assert names('a/c') == ['three', 'two']
for name in ['three', 'two']:
    assert files.delete(at(f'a/c/{name}'), False)
assert files.exists(at('a/c')) and names('a/c') == [], 'a folder without files stays'
assert files.delete(at('a'), True)
assert not files.exists(at('a'))

# A table, whose tasks and job are committed by renames.
rows = spark.range(0, 100_000).selectExpr('id', 'id % 7 AS part', 'cast(id AS string) AS text')
rows.write.partitionBy('part').parquet(f'{root}/table')
found = spark.read.parquet(f'{root}/table')
assert found.count() == 100_000 and found.filter('part = 3 AND id < 70').count() == 10
assert '_SUCCESS' in names('table') and '_temporary' not in names('table'), names('table')
rows.limit(10).write.mode('overwrite').parquet(f'{root}/table')
assert spark.read.parquet(f'{root}/table').count() == 10

# Text, which the magic committer commits.
text = 'org.apache.hadoop.io.Text'
lines = spark.sparkContext.parallelize([(str(number), 'x' * 10) for number in range(5000)], 3)
output = 'org.apache.hadoop.mapreduce.lib.output.TextOutputFormat'
lines.saveAsNewAPIHadoopFile(f'{root}/text', output, text, text)
assert names('text') == ['_SUCCESS'] + [f'part-r-0000{number}' for number in range(3)], names('text')
# The mark of this committer has the names of its files; that of the other is empty.
assert files.getFileStatus(at('text/_SUCCESS')).getLen() > 0, 'another committer'
assert spark.sparkContext.textFile(f'{root}/text').count() == 5000

assert files.delete(at(''), True)
assert not files.exists(at(''))
spark.stop()
