{{- define "tarn.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Truncated so that the name with the longest suffix ("-dashboards") is still valid. */}}
{{- define "tarn.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "tarn.name" .) .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "tarn.name" .) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "tarn.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "tarn.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{- define "tarn.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Labels that select every pod of the release. */}}
{{- define "tarn.releaseLabels" -}}
app.kubernetes.io/name: {{ include "tarn.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels that select the pods of one component. They never change between versions: selectors are immutable.
     Takes (list $ "component"), as do the helpers below it. */}}
{{- define "tarn.selectorLabels" -}}
{{- $root := first . -}}
{{ include "tarn.releaseLabels" $root }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{- define "tarn.labels" -}}
{{- $root := first . -}}
{{ include "tarn.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Labels from the values, overridden by the chart's own, so that no value can remove a pod from its selector. */}}
{{- define "tarn.podMetadata" -}}
{{- $root := first . -}}
labels: {{- merge (include "tarn.labels" . | fromYaml) $root.Values.podLabels | toYaml | nindent 2 }}
{{- with $root.Values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Service links would add TARN_… variables, and Tarn refuses to start with unknown ones. */}}
{{- define "tarn.podBasics" -}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "tarn.containerBasics" -}}
image: {{ include "tarn.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{- include "tarn.containerSecurity" . | nindent 2 }}
{{- end }}

{{- define "tarn.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "tarn.mounts" -}}
- name: scratch
  mountPath: /scratch
- name: tmp
  mountPath: /tmp
{{- end }}

{{/* Takes (dict "scratch" size "tmp" size). */}}
{{- define "tarn.volumes" -}}
volumes:
  - name: scratch
    emptyDir:
      sizeLimit: {{ .scratch }}
  - name: tmp
    emptyDir:
      sizeLimit: {{ .tmp }}
{{- end }}

{{- define "tarn.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Not empty if Spark's executors run in separate pods. */}}
{{- define "tarn.sparkOnKubernetes" -}}
{{- if hasPrefix "k8s://" .Values.spark.master }}yes{{ end }}
{{- end }}

{{- define "tarn.driverPort" -}}7078{{- end }}
{{- define "tarn.blocksPort" -}}7079{{- end }}

{{/* Spark configuration common to all workers; what differs (name, address) is in PYSPARK_SUBMIT_ARGS. */}}
{{- define "tarn.sparkConfig" -}}
{{- $executors := .Values.spark.executors -}}
spark-defaults.conf: |
  spark.kubernetes.namespace {{ .Release.Namespace }}
  spark.kubernetes.container.image {{ include "tarn.image" . }}
  spark.kubernetes.container.image.pullPolicy {{ .Values.image.pullPolicy }}
  spark.kubernetes.authenticate.executor.serviceAccountName {{ include "tarn.serviceAccountName" . }}
  spark.kubernetes.executor.podTemplateFile /etc/tarn/spark/executor.yaml
  spark.kubernetes.executor.podTemplateContainerName executor
  spark.kubernetes.executor.disableConfigMap true
  spark.kubernetes.executor.volumes.emptyDir.spark-local-dir-1.mount.path /scratch
  spark.kubernetes.executor.volumes.emptyDir.spark-local-dir-1.options.sizeLimit {{ $executors.scratch }}
  spark.kubernetes.executor.limit.cores {{ $executors.cores }}
  spark.executor.cores {{ $executors.cores }}
  spark.executor.memoryOverhead {{ $executors.memoryOverhead }}
  spark.dynamicAllocation.enabled true
  spark.dynamicAllocation.shuffleTracking.enabled true
  spark.dynamicAllocation.minExecutors {{ $executors.min }}
  spark.dynamicAllocation.maxExecutors {{ max $executors.min $executors.max }}
  spark.driver.port {{ include "tarn.driverPort" . }}
  spark.driver.blockManager.port {{ include "tarn.blocksPort" . }}
  spark.blockManager.port {{ include "tarn.blocksPort" . }}
executor.yaml: |
  apiVersion: v1
  kind: Pod
  metadata: {{- include "tarn.podMetadata" (list . "executor") | nindent 4 }}
  spec:
    {{- include "tarn.podBasics" . | nindent 4 }}
    # An executor does not use the Kubernetes API. Workload identity for the object store does not need this token.
    automountServiceAccountToken: false
    containers:
      - name: executor
        securityContext: {{- include "tarn.containerSecurity" . | nindent 10 }}
        {{- with .Values.extraEnv }}
        env: {{- toYaml . | nindent 10 }}
        {{- end }}
        volumeMounts:
          - name: tmp
            mountPath: /tmp
    volumes:
      - name: tmp
        emptyDir:
          sizeLimit: {{ $executors.tmp }}
    {{- include "tarn.placement" $executors | nindent 4 }}
{{- end }}

{{/* Environment of every process. Numbers go through toJson, because 1048576 would become 1.048576e+06. */}}
{{- define "tarn.env" -}}
- name: TARN_LAKE_URI
  value: {{ .Values.lake.uri | quote }}
{{- with .Values.lake.storageOptions }}
{{- if .existingSecret }}
- name: TARN_STORAGE_OPTIONS
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- with .Values.fetch.stores }}
{{- if .existingSecret }}
- name: TARN_FETCH_STORES
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
- name: TARN_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.database.existingSecret }}
      key: {{ .Values.database.key }}
- name: TARN_ADMIN_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.adminKey.existingSecret }}
      key: {{ .Values.adminKey.key }}
- name: TARN_SHUTDOWN_GRACE
  value: {{ .Values.shutdownGrace | toJson | quote }}
- name: TARN_SPARK_MASTER
  value: {{ .Values.spark.master | quote }}
- name: TARN_SPARK_MEMORY
  value: {{ .Values.spark.memory | quote }}
{{- range $name, $value := .Values.settings }}
- name: {{ $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Concurrent Spark tasks of one worker; empty if the master decides. */}}
{{- define "tarn.sparkTasks" -}}
{{- $master := .Values.spark.master }}
{{- $cpu := .Values.worker.resources.limits.cpu | default "1" | toString }}
{{- if include "tarn.sparkOnKubernetes" . }}{{ mul .Values.spark.executors.max .Values.spark.executors.cores }}
{{- else if regexMatch "^local\\[[0-9]+\\]$" $master }}{{ regexFind "[0-9]+" $master }}
{{- else if hasPrefix "local[" $master }}{{ hasSuffix "m" $cpu | ternary (divf (trimSuffix "m" $cpu) 1000) $cpu | float64 | ceil | int }}
{{- else if eq $master "local" }}1
{{- end }}
{{- end }}

{{/* Maximum number of PostgreSQL connections of all pods during an upgrade: docs/postgresql.md. */}}
{{- define "tarn.connections" -}}
{{- $pool := .Values.settings.TARN_DATABASE_POOL | default 10 | int }}
{{- $apis := add1 (.Values.api.autoscaling.enabled | ternary .Values.api.autoscaling.max .Values.api.replicas) }}
{{- $workers := add .Values.worker.replicas (divf .Values.worker.replicas 4 | ceil) }}
{{- $tasks := include "tarn.sparkTasks" . | default "0" | int }}
{{- add (mul $apis (add (mul 2 $pool) 17)) (mul $workers (add (mul 2 $pool) 1 (mul 4 $tasks))) 1 }}
{{- end }}
