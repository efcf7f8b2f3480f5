# One image, with the commands `api` (the default), `worker`, `migrate`, and `executor`, which Spark starts on
# Kubernetes. The root file system may be read-only: all processes write below /scratch and /tmp, and `serve` without
# settings stores its data in /data.

# Pinned to Bookworm because it has JRE 17, which Spark needs; the next Debian release has only 21.
FROM python:3.11-slim-bookworm AS build

# PyICU, a dependency of followthemoney, is built from source.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++=4:12.* \
        libicu-dev=72.* \
        pkg-config=1.8.* \
    && rm -rf /var/lib/apt/lists/*

RUN python -m venv /opt/tarn
ENV PATH=/opt/tarn/bin:$PATH
WORKDIR /src

# Install dependencies first, with empty packages, so that this layer is reused when only code changes.
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY app/tarn/__init__.py ./app/tarn/
COPY clients/python/LICENSE clients/python/README.md clients/python/pyproject.toml ./clients/python/
COPY clients/python/pyspark_tarn/__init__.py ./clients/python/pyspark_tarn/
COPY clients/python/tarn_client/__init__.py ./clients/python/tarn_client/
RUN pip install --no-cache-dir --constraint constraints.txt ./clients/python '.[otel]'

COPY app ./app
COPY clients/python ./clients/python
COPY migrations ./migrations
RUN pip install --no-cache-dir --no-deps --force-reinstall ./clients/python .


FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        libicu72=72.* \
        openjdk-17-jre-headless=17.* \
    && rm -rf /var/lib/apt/lists/*

# The uid is fixed so that volumes keep their owner and Kubernetes can verify that it is not root.
# Spark looks up the user's name, so it needs an entry in /etc/passwd.
RUN groupadd --gid 10001 tarn \
    && useradd --no-log-init --uid 10001 --gid tarn --home-dir /scratch --no-create-home --shell /usr/sbin/nologin tarn \
    && install --directory --owner tarn --group tarn /data /scratch

COPY --from=build /opt/tarn /opt/tarn

ENV PATH=/opt/tarn/bin:$PATH \
    HOME=/scratch \
    TMPDIR=/scratch \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYSPARK_PYTHON=/opt/tarn/bin/python \
    PYSPARK_DRIVER_PYTHON=/opt/tarn/bin/python \
    SPARK_LOCAL_DIRS=/scratch \
    TARN_HOST=0.0.0.0 \
    TARN_LAKE_URI=/data/lake \
    TARN_DATABASE_URL=sqlite:////data/tarn.db \
    TARN_ADMIN_KEY_FILE=/data/admin.key

# DuckDB and Spark spill to TMPDIR and SPARK_LOCAL_DIRS, or to the working directory if these are not set.
WORKDIR /scratch
USER 10001:10001
VOLUME ["/scratch", "/tmp"]
EXPOSE 8000

# For the API. A container that runs `worker` or `migrate` listens on no port: disable the check there.
# The empty ProxyHandler ignores proxy settings of the environment for this local request.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('TARN_PORT', '8000') + '/healthz', timeout=4)"]

ENTRYPOINT ["tarn"]
CMD ["api"]
